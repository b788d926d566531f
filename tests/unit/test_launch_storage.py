"""What is left of a quota, from the words of the tools that tell it; which file system a folder is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import storage

QUOTA = """Disk quotas for user bob (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home 9437184  10485760 20971520       0   90000  100000  200000       0
"""
OVER = "/dev/sda1 2097152* 1048576 3145728 1700000000 10 0 0 0\n"
LUSTRE = "      /lustre 1048576       0 4194304       -      12       0       0       -\n"
NONE = "Disk quotas for user bob (uid 1000): none\n"


@pytest.mark.parametrize(
    ("text", "gib", "files"),
    [(QUOTA, 1.0, 10_000), (OVER, 0.0, None), (LUSTRE, 3.0, None), (NONE, None, None), ("", None, None)],
)
def test_quota(text: str, gib: float | None, files: int | None) -> None:
    assert storage.parse_quota(text) == storage.Room(gib, files)


def test_the_innermost_mount_counts() -> None:
    mounts = (
        "/dev/a / ext4 rw 0 0\nb@tcp:/l /big lustre rw 0 0\nc:/x /big\\040one nfs4 rw 0 0\n/dev/d /bigger xfs rw 0 0\n"
    )
    assert storage.mount_of(Path("/big/me/run"), mounts) == ("/big", "lustre")
    assert storage.mount_of(Path("/big one/run"), mounts) == ("/big one", "nfs4")
    assert storage.mount_of(Path("/home/me"), mounts) == ("/", "ext4")


def test_the_tool_of_the_file_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "quota"
    tool.write_text('#!/bin/sh\necho "/dev/sda1 1048576 0 2097152 0 5 0 100 0"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(storage, "mount_of", lambda *a: ("/", "ext4"))
    assert storage.quota(tmp_path) == storage.Room(1.0, 95)
    tool.write_text("#!/bin/sh\nsleep 20\n")
    monkeypatch.setattr(storage, "_QUOTA_SECONDS", 0.2)
    assert storage.quota(tmp_path) == storage.Room(None, None)
