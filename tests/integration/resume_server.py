"""Runs pivotrl commands in forked children, so that twenty runs cost one import of torch. Not a test.

Reads one JSON request a line: {"arguments": [...], "env": {...}, "at": {"event": name, "number": n, "do": what}};
writes the child's exit code (negative: signal). Arguments: the engine ("fake" or "vllm"), the model, overrides. The
fake's completions depend on the global random number generators and on the weights, so that anything that is not
restored shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import pivotrl.evaluation.stage  # noqa: E402
import pivotrl.profiling.stage  # noqa: E402
import pivotrl.training.end_to_end  # noqa: E402
import pivotrl.training.grpo  # noqa: E402
import pivotrl.training.sft  # noqa: E402
from pivotrl import cli, state_folder  # noqa: E402
from pivotrl.configuration import load_config  # noqa: E402
from pivotrl.generation.base import StatefulEngine  # noqa: E402
from pivotrl.generation.engine import Completion, Sampling  # noqa: E402
from pivotrl.policy import state_files  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy  # noqa: E402
from pivotrl.rendering.chat import Renderer  # noqa: E402
from pivotrl.setup import Workbench  # noqa: E402
from pivotrl.state_folder import StateFolder  # noqa: E402
from pivotrl.training import state_writer  # noqa: E402


class DrawingEngine(StatefulEngine):
    """Completions drawn from python's, numpy's and torch's global generators; log-probs depend on the weights.

    A prefix that all prompts share counts as cached once it was computed.
    """

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop, self.digest, self.cached = stop, "start", 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        self._state.require_generate()
        event("generate")
        return [[self._one(prompt, k, seed) for k in range(n)] for prompt, seed in zip(prompts, seeds, strict=True)]

    def _one(self, prompt: Sequence[int], k: int, seed: int) -> Completion:
        draws = (random.randrange(1000), np.random.randint(1000), int(torch.randint(1000, ())))
        ids = tuple(500 + (d + 7 * k + seed) % 9000 for d in draws[: 1 + draws[0] % 3]) + (self.stop,)
        noise = hashlib.sha256(f"{self.digest}{ids}".encode()).digest()
        logprobs = tuple(-(1 + noise[i]) / 256 for i in range(len(ids)))
        return Completion(ids, logprobs, "stop", self.weight_version, self._take())

    def _take(self) -> int:
        cached, self.cached = self.cached, 32
        return cached

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        self._take()
        return [[-0.5] * len(row) for row in continuations]

    def _forget(self) -> None:
        self.cached = 0

    def _sleep(self, discard_weights: bool) -> None: ...

    def _wake(self) -> None: ...

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        event("refit")
        hasher = hashlib.sha256()
        for name, tensor in weights:
            hasher.update(name.encode())
            hasher.update(tensor.detach().numpy().tobytes())
        self.digest, self.cached = hasher.hexdigest(), 0

    def _close(self) -> None: ...


class ServedEngine(DrawingEngine):
    """As a server: what it samples depends on its weights and the seeds, and on nothing of this process."""

    def _one(self, prompt: Sequence[int], k: int, seed: int) -> Completion:
        draws = hashlib.sha256(f"{self.digest}{prompt}{k}{seed}".encode()).digest()
        ids = tuple(500 + d for d in draws[: 1 + draws[0] % 3]) + (self.stop,)
        noise = hashlib.sha256(f"{self.digest}{ids}".encode()).digest()
        return Completion(ids, tuple(-(1 + noise[i]) / 256 for i in range(len(ids))), "stop", self.weight_version)


@contextmanager
def engine(bench: Workbench, sender: object = None) -> Iterator[DrawingEngine]:
    if bench.cfg.generation.server is not None:
        yield ServedEngine(bench.renderer.stop_token_ids[0])
        return
    random.seed(1)  # as vLLM does when it starts
    np.random.seed(1)
    torch.manual_seed(1)
    yield DrawingEngine(bench.renderer.stop_token_ids[0])


_request: dict[str, Any] = {}
_seen: dict[str, int] = {}


def event(name: str) -> None:
    """Count, and do what the request asks for at this one."""
    wanted = _request.get("at")
    _seen[name] = _seen.get(name, 0) + 1
    if not wanted or wanted["event"] not in (name, "any"):
        return
    number = sum(_seen.values()) if wanted["event"] == "any" else _seen[name]
    if number != wanted["number"]:
        return
    do = wanted["do"]
    if do == "hang":
        time.sleep(100)
    elif do == "twice":
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(2.2)
        os.kill(os.getpid(), signal.SIGTERM)
    elif do == "jump":
        real = time.time
        time.time = lambda: real() - 10**8
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{do}"))


def before(owner: Any, name: str, label: str) -> None:
    """Make calls of `owner.name` events."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        event(label)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def install(kind: str) -> None:
    if kind == "fake":
        Workbench.engine = engine  # type: ignore[method-assign, assignment]
    else:
        from pivotrl.generation import vllm_engine, vllm_setup

        vllm_setup.set_environment()
        vllm_setup.import_vllm()
        before(vllm_engine.VllmEngine, "generate", "generate")
        before(vllm_engine.VllmEngine, "_load", "refit")
    before(MegatronPolicy, "train_step", "train")
    before(state_files, "_save", "piece")
    before(state_writer, "write_json", "json")
    before(state_writer, "write_index", "index")
    before(StateFolder, "commit", "commit")
    before(StateFolder, "remove", "remove")
    before(state_folder, "_sync", "sync")
    before(pivotrl.training.grpo, "load_pivots", "startup")
    before(pivotrl.training.grpo, "export", "export")


def child(request: dict[str, Any]) -> int:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request.get("env", {}))
    os.umask(int(request.get("umask", "022"), 8))
    _request.update(request)
    if after := request.get("kill_after"):
        timer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return cli.main(request["arguments"])


def main() -> None:
    torch.set_num_threads(1)
    kind, model, *overrides = sys.argv[1:]
    install(kind)
    load_config(overrides)  # what it imports is imported once; no autograd, which cannot be forked
    Renderer(Path(model), "hermes")
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = child(request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
