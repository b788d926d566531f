"""A port that a server gets must still be free when the server binds it, many seconds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pivotrl import ports


def given_out(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ip_local_port_range"
    path.write_text(text)
    return path


def test_no_connection_gets_it(tmp_path: Path) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    drawn = {ports.free_port() for _ in range(50)}
    assert len(drawn) > 40  # processes that ask at the same time get different ones
    assert not [port for port in drawn if first <= port <= last]
    upper = {ports.free_port(given_out(tmp_path, "9000\t19989\n")) for _ in range(50)}
    assert upper <= set(range(19_990, 20_000))


def test_where_connections_get_every_port_the_system_picks(tmp_path: Path) -> None:
    assert 1024 <= ports.free_port(given_out(tmp_path, "1024\t65535\n")) <= 65_535


def test_without_proc_a_low_port_is_taken(tmp_path: Path) -> None:
    assert ports.free_port(tmp_path / "absent") in ports.OURS


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "OURS", range(port, port + 1))
    assert ports.free_port() == port
    with socket.create_server(("127.0.0.1", port)):
        assert ports.free_port() != port
