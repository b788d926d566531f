"""Bytes of a file -> bytes of its rows, in constant memory: JSON Lines, a JSON array, or one JSON object.

Lines end at b"\\n" only: U+2028 and friends may stand inside strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from pivotrl.trajectories import strict_json

BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 20
SPACE = b" \t\r\n"


@dataclass(frozen=True)
class RawRow:
    line: int  # from 1: where the row begins
    data: bytes
    element: bool = False  # of a top-level array


def raw_rows(stream: IO[bytes], name: str) -> Iterator[RawRow]:
    """Rows of a file called `name`. A `.json` or `.traj` file may be an array, one object, or lines after all."""
    line_file = name.endswith((".jsonl", ".ndjson"))
    line = 0
    while head := stream.readline(CHUNK):  # bounded: a minified array is one line as long as the file
        line += 1
        if line == 1:
            head = head.removeprefix(BOM)
        if head.strip(SPACE):
            break
    else:
        return
    is_array = head.lstrip(SPACE).startswith(b"[")
    if is_array and not line_file:
        yield from _array(head, stream, line)
        return
    if not head.endswith(b"\n"):
        head += stream.readline()
    if is_array and not _is_json(head):
        yield from _array(head, stream, line)
    elif line_file or _is_json(head):
        yield from _lines(head, stream, line)
    else:
        yield RawRow(line, head + stream.read())


def _is_json(line: bytes) -> bool:
    try:
        strict_json.loads(line)
    except strict_json.StrictJsonError as error:
        return error.reason not in ("not_json", "bad_encoding")
    return True


def _lines(head: bytes, stream: IO[bytes], line: int) -> Iterator[RawRow]:
    yield RawRow(line, head)
    for number, data in enumerate(stream, line + 1):
        if data.strip(SPACE):
            yield RawRow(number, data)


TOKEN = re.compile(rb'["\\\[\]{},\n]')


def _array(head: bytes, stream: IO[bytes], line: int) -> Iterator[RawRow]:
    """Elements of a top-level array. Only brackets, strings and commas are followed; each element is judged later."""
    depth, start_line, in_string, skip_to = 0, line, False, -1
    element = bytearray()
    chunk = head
    while chunk:
        copied = 0
        for match in TOKEN.finditer(chunk):
            at, char = match.start(), match.group()
            if at < skip_to:
                continue
            if char == b"\n":
                line += 1
            elif in_string:
                if char == b"\\":
                    skip_to = at + 2
                elif char == b'"':
                    in_string = False
            elif char == b'"':
                in_string = True
            elif char in (b"[", b"{"):
                depth += 1
                if depth == 1:
                    copied, start_line = at + 1, line
            elif char in (b"]", b"}"):
                depth -= 1
            if not in_string and ((depth == 1 and char == b",") or (depth == 0 and char == b"]")):
                element += chunk[copied:at]
                if element.strip(SPACE) or char == b",":
                    yield _trimmed(element, start_line)
                element.clear()
                copied, start_line = at + 1, line
                if depth == 0:
                    yield from _rest(chunk[copied:], stream, line)
                    return
        element += chunk[copied:]
        skip_to = 1 if skip_to > len(chunk) else -1  # an escape whose second byte begins the next chunk
        chunk = stream.read(CHUNK)
    yield _trimmed(element + b" <end of file inside the array>", start_line)


def _rest(tail: bytes, stream: IO[bytes], line: int) -> Iterator[RawRow]:
    tail += stream.read(CHUNK)
    if tail.strip(SPACE):
        yield RawRow(line, b"]" + tail[:100])


def _trimmed(element: bytes | bytearray, line: int) -> RawRow:
    data = bytes(element)
    start = line + data[: len(data) - len(data.lstrip(SPACE))].count(b"\n")
    return RawRow(start, data.strip(SPACE), element=True)
