"""Commands run in a bubblewrap sandbox, to compare what they do: files, output and exit code.

No network, only the system's programs (read-only), an empty home, work directories in memory, and limits on processes,
CPU, memory and file sizes; a time-out ends the whole process tree. Without a working `bwrap` nothing is run at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from pivotrl.errors import UserError

WORK = "/work"  # the working directory; relative paths of `files` lie there
HOME = "/home/user"
# Top-level directories that `files` may not shadow.
_SYSTEM = frozenset(
    {"bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "tmp", "usr"}
)
# One path of a state: (kind, permissions, content or link target); kinds are "file" and tar's types ("5": directory,
# "2": symbolic link, "1": hard link).
Entry = tuple[str, int, bytes]
Content = str | bytes | Entry
_MAX_ARGUMENT = 128 * 1024 - 1  # bytes; Linux MAX_ARG_STRLEN
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
_MAX_ENTRIES = 20_000  # files that are taken out again
# $1: command, $2: working directory, $3, $4: descriptors of the archive and of the list of modes, $5...: directories to
# bring in and out. tar runs outside the limits; the command has neither its input nor its descriptors, and what it left
# running is ended first, so that nothing touches the archive that it is judged by. What its owner cannot read is made
# readable for tar, and its mode is listed.
_SCRIPT = """
command=$1 directory=$2 archive=$3 modes=$4; shift 4
tar -x -f - -C / 2>/dev/null || exit 125
cd "$directory" || exit 125
( eval "exec $archive>&- $modes>&-"
  ulimit -u {processes} -t {cpu_seconds} -v {memory_kb} -f {file_blocks} -c 0
  exec bash -c "$command" ) </dev/null
code=$?
kill -KILL -- -1 2>/dev/null
cd /
ulimit -f {archive_blocks}
find "$@" ! -type l '(' ! -perm -u=r -o -type d ! -perm -u=rx ')' -printf '%m %p\\0' -exec chmod u+rwx '{{}}' ';' \\
  >&"$modes" 2>/dev/null
tar -c -f - --sort=name -C / "$@" >&"$archive" 2>/dev/null
exit $code
"""


@dataclass(frozen=True)
class Limits:
    """Per run; memory, CPU and file size are per process, `disk_mb` for all files together."""

    seconds: float = 5.0
    cpu_seconds: int = 5
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 16
    disk_mb: int = 64


@dataclass(frozen=True)
class Effect:
    """What a command did. `files`: path -> (kind, permissions, content or link target) after the run."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    files: dict[str, Entry]
    timed_out: bool = False
    complete: bool = True  # False: there were more files than are looked at


def unusable() -> str | None:
    """Why the sandbox cannot be used on this machine, or None if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (apt-get install bubblewrap)"
    return _probe()


@lru_cache(maxsize=1)
def _probe() -> str | None:
    try:
        effect = _run("exit 7", {}, Limits(seconds=20))
    except OSError as error:
        return f"bwrap does not start: {error}"
    if effect.exit_code == 7:
        return None
    return f"bwrap does not work here (user namespaces off?): {effect.stderr.decode(errors='replace').strip()[:300]}"


def run(command: str, files: Mapping[str, Content], limits: Limits | None = None) -> Effect:
    """Run bash `command` on `files` (relative to the work directory, or absolute outside system directories).

    A file is its content, or an entry as `work_entries` gives it, so that a command can go on where one ended.

    Raises UserError if there is no working sandbox, or for a path that leaves its place. A time-out is in the result.
    """
    if reason := unusable():
        raise UserError(
            f"refusing to run a command outside a sandbox: {reason}; or turn execution off for this verifier"
        )
    return _run(command, files, limits or Limits())


def may_hold(path: str) -> bool:
    """Whether a file may lie at this absolute path: below a directory that is not the system's."""
    parts = posixpath.normpath(path).split("/")
    return path.startswith("/") and "\0" not in path and len(parts) >= 3 and parts[1] not in _SYSTEM


def compare_execution(
    command_a: str, command_b: str, files: Mapping[str, Content], limits: Limits | None = None
) -> tuple[bool | None, str]:
    """Whether both commands do the same to `files`: (equal, why), symmetric.

    None where it cannot be told: a time-out, too many files, or a command that does not do the same twice. It only
    speaks for these files: two commands that fail alike because a file is missing are equal, so give what the command
    works on.
    """
    if not (_runnable(command_a) and _runnable(command_b)):
        return None, "not_runnable"
    a, b = run(command_a, files, limits), run(command_b, files, limits)
    if a.timed_out or b.timed_out:
        return None, "timed_out"
    if not (a.complete and b.complete):
        return None, "too_many_files"
    why = _difference(a, b)
    if why is None:
        return True, "same_effect"
    if _difference(a, run(command_a, files, limits)) or _difference(b, run(command_b, files, limits)):
        return None, "not_deterministic"
    return False, why


def _difference(a: Effect, b: Effect) -> str | None:
    for name in ("exit_code", "files", "stdout", "stderr"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}_differ" if name == "files" else f"{name}_differs"
    return None


def _run(command: str, files: Mapping[str, Content], limits: Limits) -> Effect:
    if not _runnable(command):
        return Effect(127, b"", b"not a command line", {})
    archive, roots = _pack(files)
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as modes,
    ):
        stdin.write(archive)
        stdin.seek(0)
        user = _identity()
        arguments = _arguments(command, roots, limits, result.fileno(), modes.fileno())
        process = subprocess.Popen(
            arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(result.fileno(), modes.fileno()),
            start_new_session=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            user=user,
            group=user,
            extra_groups=None if user is None else (),
        )
        try:
            code, timed_out = process.wait(timeout=limits.seconds), False
        except subprocess.TimeoutExpired:
            code, timed_out = -1, True
        finally:
            _end(process)
        limit = limits.file_mb << 20
        found, complete = _unpack(result, _content(modes, limit))
        return Effect(code, _content(stdout, limit), _content(stderr, limit), found, timed_out, complete)


def _runnable(command: str) -> bool:
    """Whether the system can hand `command` to a process: no NUL, and short enough for one argument."""
    return "\0" not in command and len(command.encode("utf-8", "surrogatepass")) < _MAX_ARGUMENT


def _identity() -> int | None:
    """As root, run as a user that owns nothing: limits on processes do not bind root. Each run has its own."""
    if os.geteuid() != 0:
        return None
    return 1_000_000 + secrets.randbelow(1_000_000_000)


def _end(process: subprocess.Popen[bytes]) -> None:
    """bwrap dies, with it the init of its PID namespace, and with that every process inside."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _arguments(command: str, roots: list[str], limits: Limits, archive: int, modes: int) -> list[str | bytes]:
    disk = str(limits.disk_mb << 20)
    arguments: list[str | bytes] = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    if _supports("--disable-userns"):
        arguments.append("--disable-userns")
    arguments += ["--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    for name, value in {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TZ": "UTC"}.items():
        arguments += ["--setenv", name, value]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for path in _ETC:
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in (HOME, "/tmp", *roots):
        arguments += ["--perms", "0755", "--size", disk, "--tmpfs", path]
    script = _SCRIPT.format(
        processes=limits.processes,
        cpu_seconds=limits.cpu_seconds,
        memory_kb=limits.memory_mb << 10,
        file_blocks=limits.file_mb << 10,
        archive_blocks=2 * limits.disk_mb << 10,
    )
    captured = [root.lstrip("/") for root in roots] + [HOME.lstrip("/")]
    arguments += ["--remount-ro", "/", "--chdir", WORK, "--", "/bin/bash", "-c", script, "sandbox"]
    return [*arguments, command.encode("utf-8", "surrogatepass"), WORK, str(archive), str(modes), *captured]


@lru_cache(maxsize=4)
def _supports(option: str) -> bool:
    """Whether this bwrap has `option`: 0.8 and later can forbid further user namespaces inside."""
    return option in subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


def _pack(files: Mapping[str, Content]) -> tuple[bytes, list[str]]:
    """A tar archive of `files`, and the top-level directories to mount, the work directory among them."""
    roots = {WORK}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in sorted(files.items()):
            path = posixpath.normpath(posixpath.join(WORK, name))
            escapes = not path.startswith(WORK + "/") if not name.startswith("/") else not may_hold(path)
            if escapes or "\0" in name:
                raise UserError(f"sandbox: file {name!r} would lie outside the work directory or in a system directory")
            roots.add("/" + path.split("/")[1])
            entry_of = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
            kind, mode, data = entry_of if isinstance(entry_of, tuple) else ("file", 0o644, entry_of)
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mode, entry.mtime = mode, 1_700_000_000
            entry.uid = entry.gid = 1000
            if kind == "file":
                entry.size = len(data)
            else:
                entry.type, entry.linkname = kind.encode("latin-1"), data.decode("utf-8", "surrogateescape")
            archive.addfile(entry, io.BytesIO(data) if kind == "file" else None)
    return buffer.getvalue(), sorted(roots)


def _unpack(result: IO[bytes], modes: bytes) -> tuple[dict[str, Entry], bool]:
    """What the command left, and whether that is all; read in memory: nothing is ever extracted on the host.

    `modes`: "mode path" of what had to be made readable, each ended by a NUL.
    """
    rows = (row.partition(b" ") for row in modes.split(b"\0") if row)
    listed = {path.decode("utf-8", "surrogateescape"): int(mode, 8) for mode, _, path in rows}
    found: dict[str, Entry] = {}
    result.seek(0)
    with contextlib.suppress(tarfile.TarError, EOFError), tarfile.open(fileobj=result, mode="r:") as archive:
        for entry in archive:
            if len(found) == _MAX_ENTRIES:
                return found, False
            kind, content = entry.type.decode("latin-1"), entry.linkname.encode("utf-8", "surrogateescape")
            if entry.isreg() and (file := archive.extractfile(entry)):
                kind, content = "file", file.read()
            found[entry.name] = (kind, listed.get(entry.name, entry.mode), content)
    return found, True


def _content(file: IO[bytes], limit: int) -> bytes:
    file.seek(0)
    return file.read(limit)


def work_files(effect: Effect) -> dict[str, bytes]:
    """Regular files below the work directory, by relative path."""
    prefix = Path(WORK).name + "/"
    return {name[len(prefix) :]: f[2] for name, f in effect.files.items() if f[0] == "file" and name.startswith(prefix)}


def work_entries(effect: Effect) -> dict[str, Entry]:
    """All that lies below the work directory, by relative path: what `run` takes to go on from here."""
    prefix = Path(WORK).name + "/"
    return {name[len(prefix) :]: entry for name, entry in effect.files.items() if name.startswith(prefix)}
