"""The sandbox: what commands do is seen and compared, and nothing gets out."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pivotrl.errors import UserError
from pivotrl.verifiers import sandbox
from pivotrl.verifiers.sandbox import Limits, compare_execution, run, work_files

REASON = sandbox.unusable()
needs_bwrap = pytest.mark.skipif(REASON is not None, reason=f"no sandbox: {REASON}")


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in command:
                found.append(entry.name)
    return found


def assert_gone(mark: str) -> None:
    for _ in range(40):
        if not processes_with(mark):
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {processes_with(mark)}")


def test_refuses_to_run_without_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    for attempt in (lambda: run("true", {}), lambda: compare_execution("true", "true", {})):
        with pytest.raises(UserError, match="bwrap is not installed"):
            attempt()


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "/usr/bin/ls", "/x", "/home/user/.bashrc", "a\0b", ".", ""]
)
def test_refuses_files_out_of_place(name: str) -> None:
    with pytest.raises(UserError, match="outside"):
        sandbox._pack({name: ""})


@needs_bwrap
def test_effect_of_a_command() -> None:
    effect = run("cat a; cat /app/b; echo new > c; echo e >&2; exit 3", {"a": "1\n", "/app/b": "2\n"})
    assert (effect.exit_code, effect.stdout, effect.stderr, effect.timed_out) == (3, b"1\n2\n", b"e\n", False)
    assert work_files(effect) == {"a": b"1\n", "c": b"new\n"}


@needs_bwrap
@pytest.mark.parametrize(
    ("a", "b", "equal", "why"),
    [
        ("sort a", "cat a | sort", True, "same_effect"),
        ("sed -i s/1/3/ a", "perl -pi -e s/1/3/ a", True, "same_effect"),
        ("mv a b", "cp a b && rm a", True, "same_effect"),
        ("cp a b", "cp b a", False, "files_differ"),
        ("rm -rf src", "ls src", False, "files_differ"),
        ("cat a", "cat b", False, "stdout_differs"),
        ("true", "false", False, "exit_code_differs"),
        ("chmod +x a", "chmod -w a", False, "files_differ"),
        ("ln -s a l", "ln -s b l", False, "files_differ"),
        ("touch $HOME/x", "true", False, "files_differ"),
        ("echo $RANDOM$RANDOM", "echo 1", None, "not_deterministic"),
        ("sleep 30", "true", None, "timed_out"),
    ],
)
def test_compare_execution(a: str, b: str, equal: bool | None, why: str) -> None:
    files = {"a": "2\n1\n", "b": "x\n", "src/c": ""}
    limits = Limits(seconds=1.5) if "sleep" in a else Limits(seconds=20)
    assert compare_execution(a, b, files, limits) == (equal, why)


# Escapes ----------------------------------------------------------------------------------------------


@needs_bwrap
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        heard = threading.Event()
        server.settimeout(2)

        def listen() -> None:
            try:
                server.accept()[0].close()
                heard.set()
            except OSError:
                pass

        listener = threading.Thread(target=listen)
        listener.start()
        effect = run(f"echo hi > /dev/tcp/127.0.0.1/{port}; grep -vc lo: /proc/net/dev", {}, Limits(seconds=20))
        listener.join()
    assert not heard.is_set()
    assert b"refused" in effect.stderr or b"unreachable" in effect.stderr
    assert effect.stdout.strip() == b"2"  # the two header lines: no interface but lo


@needs_bwrap
def test_nothing_is_written_outside(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("kept")
    tmp_path.chmod(0o777)
    mark.chmod(0o666)
    command = f"rm -rf {mark} {tmp_path}/new; echo x > {mark}; echo x > /usr/x; echo x > /etc/x; echo x > /x; mkdir /y"
    effect = run(command, {}, Limits(seconds=20))
    assert mark.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["mark"]
    assert not any(Path(p).exists() for p in ("/usr/x", "/etc/x", "/x", "/y"))
    assert effect.stderr.count(b"Read-only file system") == 4


@needs_bwrap
def test_home_and_secrets_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "sesame")
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    tmp_path.chmod(0o755)
    home = Path.home()
    command = (
        f"ls -A {home} ~; cat {secret} /etc/shadow /etc/passwd; env; ls -A /home /root {Path.cwd()}; "
        "cat /proc/*/environ; for f in /proc/self/fd/*; do cat <$f; done"
    )
    effect = run(command, {}, Limits(seconds=20))
    assert b"sesame" not in effect.stdout + effect.stderr
    assert b"root:" not in effect.stdout
    assert b"pyproject" not in effect.stdout


@needs_bwrap
def test_fork_bomb_is_bounded_and_leaves_nothing() -> None:
    mark = "7654.321"
    effect = run(f"bomb() {{ bomb | bomb & sleep {mark}; }}; bomb; sleep {mark}", {}, Limits(seconds=3, processes=24))
    assert effect.timed_out
    assert_gone(mark)
    forks = """python3 -c '
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(9)
            os._exit(0)
        n += 1
except OSError:
    print(n, flush=True)
os._exit(0)'"""
    assert 5 < int(run(forks, {}, Limits(seconds=20, processes=24)).stdout) < 24


@needs_bwrap
def test_time_out_ends_the_whole_tree() -> None:
    mark = "7655.432"
    effect = run(
        f"setsid sleep {mark} & nohup sleep {mark} & (sleep {mark} &) ; trap '' TERM; sleep {mark}",
        {},
        Limits(seconds=1),
    )
    assert effect.timed_out
    assert_gone(mark)
    assert run(f"setsid sleep {mark} & echo done", {}, Limits(seconds=20)).stdout == b"done\n"
    assert_gone(mark)


@needs_bwrap
def test_symlink_tricks(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    tmp_path.chmod(0o755)
    links = f"ln -s {secret} a; ln -s / root; ln -s ../../../../.. up; "
    command = links + f"cat a root{secret} up{secret}; echo x > a; mknod d c 1 3; cp -L a b"
    effect = run(command, {}, Limits(seconds=20))
    assert b"sesame" not in effect.stdout
    assert secret.read_text() == "sesame"
    kinds = {name: entry[0] for name, entry in effect.files.items()}
    assert kinds["work/a"] == kinds["work/root"] == "2"  # links, recorded as such and never followed
    assert all(not content.startswith(b"sesame") for _, _, content in effect.files.values())


@needs_bwrap
def test_memory_and_files_are_bounded() -> None:
    limits = Limits(seconds=30, memory_mb=200, file_mb=2, disk_mb=8)
    assert run("head -c 400M /dev/zero | tail -c 400M | wc -c", {}, limits).stdout.strip() != b"419430400"
    big = work_files(
        run(
            "head -c 9M /dev/zero > big; for i in 1 2 3 4 5 6 7 8 9; do head -c 1900K /dev/zero > f$i; done", {}, limits
        )
    )
    assert len(big["big"]) <= 2 << 20
    assert sum(map(len, big.values())) <= 8 << 20
    assert len(run("yes", {}, limits).stdout) <= 2 << 20


@needs_bwrap
def test_no_more_rights_inside() -> None:
    effect = run(
        "mount -t tmpfs x /mnt; grep CapEff /proc/self/status; kill -9 1; sysctl -w kernel.hostname=x",
        {},
        Limits(seconds=20),
    )
    assert b"CapEff:\t0000000000000000" in effect.stdout


def in_sandbox(command: str, **limits: Any) -> sandbox.Effect:
    return run(command, {"a": "x\n"}, Limits(**{"seconds": 20, **limits}))


@needs_bwrap
def test_processes_outside_are_neither_seen_nor_signalled() -> None:
    with subprocess.Popen(["sleep", "7656.543"]) as outside:
        try:
            effect = in_sandbox(f"kill -9 {outside.pid}; kill -STOP -1; cat /proc/{outside.pid}/cmdline; ls /proc")
            assert outside.poll() is None
            assert b"7656" not in effect.stdout
            seen = [name for name in effect.stdout.decode().split() if name.isdigit()]
            assert len(seen) < 10
        finally:
            outside.kill()


@needs_bwrap
def test_no_way_back_through_proc(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    tmp_path.chmod(0o755)
    roots = " ".join(f"/proc/{pid}/root{secret} /proc/{pid}/cwd/../..{secret}" for pid in ("1", "2", "self", "$PPID"))
    effect = in_sandbox(f"cat {roots}; cat /proc/1/environ /proc/1/maps /proc/keys | tr '\\0' ' '")
    assert b"sesame" not in effect.stdout
    writes = (
        "for f in /proc/sys/kernel/hostname /proc/sysrq-trigger /proc/sys/vm/drop_caches; do echo h > $f; done; echo $?"
    )
    assert in_sandbox(writes).stdout == b"1\n"


@needs_bwrap
def test_no_namespaces_no_set_uid_no_tty_no_devices() -> None:
    command = """
    unshare -Ur id -u; unshare -m true && echo mounted; chroot / true && echo rooted
    grep NoNewPrivs /proc/self/status
    (echo x > /dev/tty) 2>&1; mknod m c 1 3 && echo made
    for d in /dev/sda /dev/mem /dev/kmsg /dev/fuse /dev/kvm; do test -e $d && echo found $d; done
    """
    effect = in_sandbox(command)
    for word in (b"mounted", b"rooted", b"found", b"made"):
        assert word not in effect.stdout, effect
    assert b"NoNewPrivs:\t1" in effect.stdout
    assert b"0\n" not in effect.stdout.splitlines(keepends=True)  # nobody is root, not even in a namespace of its own
    assert b"/dev/tty: No such device" in effect.stdout


CONNECT = """
import socket, sys
for name in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(name.replace("@", chr(0)))
        print("in")
    except OSError:
        print("out")
"""


@needs_bwrap
def test_sockets_of_the_host_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(path))
        path.chmod(0o777)
        abstract.bind("\0pivotrl-test-7657")
        for server in (named, abstract):
            server.listen()
            server.settimeout(0.2)
        effect = in_sandbox(f"python3 -c '{CONNECT}' {path} @pivotrl-test-7657")
        for server in (named, abstract):
            with pytest.raises(TimeoutError):
                server.accept()
    assert effect.stdout == b"out\nout\n", effect


@needs_bwrap
def test_shared_memory_and_temporary_files_stay_inside() -> None:
    before = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()}
    in_sandbox("echo x > /dev/shm/pivotrl-7658; echo x > /tmp/pivotrl-7658; echo x > /var/tmp/pivotrl-7658")
    assert not [p for p in {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()} - before if "7658" in p.name]
    assert in_sandbox("ls /dev/shm /tmp").stdout.split() == [b"/dev/shm:", b"/tmp:"]  # nor do they last


@needs_bwrap
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("chmod 000 a", "rm a"),  # what its owner cannot read is still there
        ("mkdir d; echo x > d/f; chmod 000 d", "mkdir d; chmod 000 d"),
        ("mkdir d; echo x > d/f; chmod 000 d", "mkdir d; echo y > d/f; chmod 000 d"),
        ("chmod 000 a", "chmod 200 a"),
        ("mv a b; ln -s b a", "cp a b"),
        ("mkfifo p", ": > p"),
        ("touch -- '-rf'", "touch rf"),
        ("printf x > 'n\n1'", "printf x > n1"),
        ("rm -r /work/* ; ln -s /usr /work/d", "rm -r /work/*; mkdir /work/d"),
        ("echo x > $HOME/.profile", "true"),
    ],
)
def test_what_is_left_is_seen_whole(one: str, other: str) -> None:
    assert compare_execution(one, one, {"a": "1\n"}, Limits(seconds=20)) == (True, "same_effect")
    assert compare_execution(one, other, {"a": "1\n"}, Limits(seconds=20)) == (False, "files_differ")


@needs_bwrap
def test_nothing_that_is_left_running_can_forge_the_result() -> None:
    """A process in the background that waits for the archive and writes into it through /proc."""
    forge = """
    rm a
    (exec 2>/dev/null; while :; do for f in /proc/[0-9]*/fd/*; do
       case $(readlink $f) in *deleted*) cat forged > $f;; esac; done; done) &
    setsid sh -c 'while :; do kill -STOP $(pgrep -x tar); done' >/dev/null 2>&1 &
    echo forged > forged; sleep 0.3
    """
    effect = in_sandbox(forge)
    assert not effect.timed_out
    assert work_files(effect) == {"forged": b"forged\n"}


@needs_bwrap
def test_very_many_files_are_not_compared() -> None:
    many = "mkdir d; cd d; seq 1 30000 | xargs touch"
    effect = in_sandbox(many)
    assert not effect.complete and len(effect.files) == 20_000
    assert compare_execution(many, many, {}, Limits(seconds=20)) == (None, "too_many_files")


@needs_bwrap
@pytest.mark.parametrize(
    "command", ["", "\0", "'", "exit 300", "kill -9 $$", "echo >&9", "kill -9 -1", "\ud800", "a" * 200_000]
)
def test_total(command: str) -> None:
    assert isinstance(run(command, {}, Limits(seconds=20)).exit_code, int)


@needs_bwrap
def test_commands_that_cannot_be_run_are_not_equal() -> None:
    for command in ("\0a", "a" * 200_000):
        assert compare_execution(command, command + "b", {}) == (None, "not_runnable")
