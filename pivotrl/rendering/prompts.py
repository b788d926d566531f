"""Prompts of many states: from the cache of a run, else rendered, by several processes where that pays."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import JsonDict

if TYPE_CHECKING:
    from pivotrl.rendering.chat import Renderer

State = tuple[Sequence[JsonDict], Sequence[JsonDict]]  # messages, tools

PARALLEL_FROM = 1000  # states; below, starting processes takes longer than rendering
PER_TASK = 16  # states that a process gets at once: turns of one trajectory, which share their messages
PER_FILE = 4096  # prompts that are committed at once
MOST_WORKERS = 16
_HEAD = struct.Struct("<16sI")  # key of a state, number of ids


def prompts_of(
    states: Sequence[State], renderer: Renderer, workers: int = 1, cache: Path | None = None
) -> Iterator[tuple[int, ...]]:
    """Token ids of each state, in order, as `renderer.prompt_ids` gives them.

    `workers`: processes (0: the CPUs of this process, shared among the ranks of its node). `cache`: a folder that keeps
    what was rendered, under the renderer's fingerprint. Equal ids are one object, so a prompt takes 8 bytes a token.
    """
    same: dict[int, int] = {}
    store = PromptCache(cache, renderer.fingerprint()) if cache is not None else None
    keys = [store.key(state) for state in states] if store is not None else []
    missing = [i for i, key in enumerate(keys) if key not in store] if store is not None else range(len(states))
    rendered = _rendered([states[i] for i in missing], renderer, workers)
    waiting = set(missing)
    for i in range(len(states)):
        if i in waiting:
            ids = next(rendered)
            if store is not None:
                store.add(keys[i], ids)
        else:
            assert store is not None
            ids = store.get(keys[i])
        yield tuple(map(same.setdefault, ids, ids))
    if store is not None:
        store.commit()
        store.close()


def _rendered(states: Sequence[State], renderer: Renderer, workers: int) -> Iterator[Sequence[int]]:
    count = min(workers or default_workers(), len(states) // PER_TASK)
    if count < 2 or len(states) < PARALLEL_FROM:
        for messages, tools in states:
            yield renderer.prompt_ids(messages, tools)
        return
    made = (str(renderer.model_dir), renderer.chat_template, renderer.action_format)
    # Spawned, not forked: this process may hold threads, an engine or a GPU.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _start, made)
    try:
        tasks = [states[i : i + PER_TASK] for i in range(0, len(states), PER_TASK)]
        for group in pool.map(_render, tasks):
            yield from group
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run does not wait for what is queued


def default_workers() -> int:
    """CPUs of this process, shared among the ranks that a launcher started on this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    affinity = getattr(os, "sched_getaffinity", None)  # Linux; elsewhere all CPUs count
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cpus // ranks, MOST_WORKERS))


_worker: Any = None  # the renderer of a worker process


def _start(model_dir: str, chat_template: str | None, action_format: str) -> None:
    from pivotrl.rendering.chat import Renderer

    global _worker
    _worker = Renderer(Path(model_dir), chat_template, action_format)


def _render(states: Sequence[State]) -> list[array[int]]:
    return [array("I", _worker.prompt_ids(messages, tools)) for messages, tools in states]


class PromptCache:
    """Rendered prompts in a folder: files of (key, ids), each written whole, so that processes may share the folder.

    Keys hold the renderer's fingerprint: another template or tokenizer finds nothing. Memory: the place of each prompt.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint.encode()
        self._places: dict[bytes, tuple[Path, int, int]] = {}  # file, offset of the ids, their number
        self._added: dict[bytes, Sequence[int]] = {}
        self._open: tuple[Path, IO[bytes]] | None = None
        for file in sorted(folder.glob("*.ids")):
            self._index(file)

    def _index(self, file: Path) -> None:
        end = file.stat().st_size
        with file.open("rb") as stream:
            while head := stream.read(_HEAD.size):
                key, count = _HEAD.unpack(head)
                self._places[key] = (file, stream.tell(), count)
                if stream.seek(4 * count, os.SEEK_CUR) > end:
                    raise UserError(f"{file} is cut short. Delete it; its prompts are rendered again.")

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._added

    def key(self, state: State) -> bytes:
        """16 bytes of the state as the template gets it (the order of keys counts: templates write JSON)."""
        text = json.dumps([list(state[0]), list(state[1])])
        return hashlib.blake2b(self._fingerprint + text.encode(), digest_size=16).digest()

    def get(self, key: bytes) -> Sequence[int]:
        if key in self._added:
            return self._added[key]
        file, offset, count = self._places[key]
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, file.open("rb"))
        self._open[1].seek(offset)
        return array("I", self._open[1].read(4 * count))

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def add(self, key: bytes, ids: Sequence[int]) -> None:
        self._added[key] = ids
        if len(self._added) >= PER_FILE:
            self.commit()

    def commit(self) -> None:
        """Write what was added. A killed process loses at most the prompts since the last commit."""
        if not self._added:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2b(b"".join(islice(self._added, 64)), digest_size=8).hexdigest()
        file = self._folder / f"{name}.ids"
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as stream:
            for key, ids in self._added.items():
                stream.write(_HEAD.pack(key, len(ids)))
                stream.write(array("I", ids).tobytes())
        temporary.replace(file)
        self._index(file)
        self._added = {}
