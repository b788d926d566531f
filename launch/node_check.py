"""The first step of every job: each process says what its node has, and the job ends at once where a node is bad.

`python -m launch.node_check` under srun, one process per GPU. Process 0 judges; all end with its verdict: 0, or 4 with
the bad nodes named on stderr. Never hangs: PIVOTRL_CHECK_SECONDS is the limit of the whole check.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pivotrl.stopping import leave_on_warning

EXIT_BAD_NODE = 4
MAX_SKEW_SECONDS = 10.0
MIN_FREE_GPU = 0.9  # of a GPU's memory: another process holds the rest
_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 3.0
_ELEMENTS = {"nccl": 1 << 24, "gloo": 1 << 18}  # float32 of the all-reduce


@dataclass(frozen=True)
class Facts:
    """What one process found on its node."""

    host: str
    clock: float  # seconds since the epoch, told when process 0 asks
    gpus: int  # that this process can see
    free_gpu: float | None  # free share of the memory of this process's GPU
    token: str | None  # read from the shared folder; None: not there


def faults(facts: dict[int, Facts], seen: dict[int, float], gpus: int, token: str, folder: str) -> list[str]:
    """What is wrong, each with its node. `seen`: process 0's clock when it saw each process's facts."""
    found = []
    for rank, f in sorted(facts.items()):
        where = f"node {f.host} (process {rank})"
        if f.gpus < gpus:
            found.append(f"{where}: {f.gpus} GPUs visible, {gpus} expected; look at nvidia-smi there")
        elif f.free_gpu is not None and f.free_gpu < MIN_FREE_GPU:
            found.append(f"{where}: only {f.free_gpu:.0%} of its GPU's memory is free; another process holds the rest")
        if f.token != token:
            found.append(f"{where}: does not see {folder}; run_dir must be on a file system that all nodes share")
        if abs(skew := f.clock - seen[rank]) > MAX_SKEW_SECONDS:
            found.append(f"{where}: its clock is {skew:+.0f} s off (limit {MAX_SKEW_SECONDS:.0f}); look at chrony")
    return found


def silent(ranks: list[int], hosts: list[str], world: int) -> str:
    """Names the nodes of processes that did not answer (srun places ranks in blocks, as many on every node)."""
    per_node = max(world // max(len(hosts), 1), 1)
    named: dict[str, list[int]] = {}
    for rank in ranks:
        named.setdefault(hosts[min(rank // per_node, len(hosts) - 1)] if hosts else "unknown", []).append(rank)
    return ", ".join(f"node {host} (process {', '.join(map(str, r))})" for host, r in named.items())


class _Check:
    def __init__(self) -> None:
        env = os.environ
        self.rank, self.world = int(env.get("SLURM_PROCID", "0")), int(env.get("SLURM_NTASKS", "1"))
        self.local_rank = int(env.get("SLURM_LOCALID", "0"))
        self.gpus = int(env.get("PIVOTRL_CHECK_GPUS", "0"))
        self.seconds = float(env.get("PIVOTRL_CHECK_SECONDS", "120"))
        self.folder = Path(env["PIVOTRL_CHECK_DIR"]) / ".node_check"
        self.hosts = [h for h in env.get("PIVOTRL_HOSTS", "").split(",") if h]
        self.host = socket.gethostname()
        self.started = time.monotonic()
        self.doing = "starting"
        self.store: Any = None

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def watch(self) -> None:
        """End this process at the limit, whatever it hangs in; process 0 leaves first, with the better message."""
        time.sleep(max(self.left(), 0) + (5.0 if self.rank else 1.5) + _FAREWELL_SECONDS)
        print(
            f"node check: node {self.host} (process {self.rank}) hung while {self.doing}", file=sys.stderr, flush=True
        )
        os._exit(EXIT_BAD_NODE)

    def run(self) -> list[str]:
        from torch.distributed import TCPStore

        threading.Thread(target=self.watch, daemon=True).start()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.doing = f"connecting to {address}:{port}"
        limit = timedelta(seconds=max(self.left(), 1.0))
        self.store = TCPStore(address, port, None, self.rank == 0, limit, wait_for_workers=False)
        if self.rank == 0:
            return self._judge()
        self.doing = "waiting for process 0"
        token_path = self.store.get("token").decode()
        self._tell(token_path)
        return self._reduce_and_hear()

    def _judge(self) -> list[str]:
        token = f"{os.environ.get('SLURM_JOB_ID', '0')}-{time.time_ns()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / token
        path.write_text(token, encoding="utf-8")
        try:
            self._tell(str(path))  # before the others answer: then their clocks are read as they do
            self.store.set("token", str(path))
            seen = self._await("facts", range(self.world))
            found = self._missing(seen, "did not answer")
            facts = {r: Facts(**json.loads(self.store.get(f"facts/{r}"))) for r in seen}
            found += faults(facts, seen, self.gpus, token, str(path))
            if not found:
                self.store.set("go", "1")
                self._reduce()
                self.store.set("reduced/0", "1")
                found = self._missing(self._await("reduced", range(self.world)), "did not finish an all-reduce")
            else:
                self.store.set("go", "0")
            self.store.set("verdict", "\n".join(found))
            self._await("bye", [r for r in seen if r], at_most=_FAREWELL_SECONDS)  # the store ends with this process
            return found
        finally:
            path.unlink(missing_ok=True)

    def _tell(self, token_path: str) -> None:
        self.doing = "looking at its GPU"
        gpus, free = self._gpu()
        self.doing = "reading the shared file system"
        token = _read_late(Path(token_path), min(10.0, self.left() / 2))
        self.doing = "answering"
        facts = Facts(self.host, time.time(), gpus, free, token)
        self.store.set(f"facts/{self.rank}", json.dumps(asdict(facts)))

    def _gpu(self) -> tuple[int, float | None]:
        if not self.gpus:
            return 0, None
        import torch

        count = torch.cuda.device_count()
        if count <= self.local_rank:
            return count, None
        torch.cuda.set_device(self.local_rank)
        free, total = torch.cuda.mem_get_info()
        return count, free / total

    def _reduce_and_hear(self) -> list[str]:
        self.doing = "waiting for the other nodes"
        if self.store.get("go") == b"1":
            self._reduce()
            self.store.set(f"reduced/{self.rank}", "1")
        self.doing = "waiting for the verdict"
        text = self.store.get("verdict").decode()
        self.store.set(f"bye/{self.rank}", "1")
        return text.splitlines()

    def _reduce(self) -> None:
        import torch
        import torch.distributed as dist

        self.doing = f"all-reducing with {', '.join(self.hosts)}"
        backend = "nccl" if self.gpus else "gloo"
        limit = timedelta(seconds=max(self.left(), 1.0))
        dist.init_process_group(
            backend, store=dist.PrefixStore("check", self.store), rank=self.rank, world_size=self.world, timeout=limit
        )
        x = torch.full((_ELEMENTS[backend],), float(self.rank + 1), device="cuda" if self.gpus else "cpu")
        dist.all_reduce(x)
        if (got := float(x[-1])) != self.world * (self.world + 1) / 2:
            raise RuntimeError(f"node {self.host}: an all-reduce over {self.world} processes gave {got}")
        dist.destroy_process_group()

    def _await(self, what: str, ranks: Sequence[int], at_most: float | None = None) -> dict[int, float]:
        """Wait until each of `ranks` has set `what`/RANK; {rank: our clock when first seen} of those that did."""
        end = time.monotonic() + (self.left() if at_most is None else at_most)
        seen: dict[int, float] = {}
        while len(seen) < len(ranks) and time.monotonic() < end:
            self.doing = f"waiting for {silent([r for r in ranks if r not in seen], self.hosts, self.world)}"
            for rank in ranks:
                if rank not in seen and self.store.check([f"{what}/{rank}"]):
                    seen[rank] = time.time()
            time.sleep(_POLL_SECONDS)
        return seen

    def _missing(self, seen: dict[int, float], fault: str) -> list[str]:
        absent = [r for r in range(self.world) if r not in seen]
        return [f"{silent(absent, self.hosts, self.world)} {fault} within {self.seconds:.0f} s"] if absent else []


def _read_late(path: Path, seconds: float) -> str | None:
    """A small file that another node has just written: network file systems show it some seconds later."""
    end = time.monotonic() + seconds
    while True:
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            if time.monotonic() > end:
                return None
            time.sleep(0.2)


def main() -> int:
    check = _Check()
    try:
        found = check.run()
    except Exception as error:
        print(
            f"node check: node {check.host} (process {check.rank}) failed while {check.doing}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_BAD_NODE
    if check.rank == 0:
        took = time.monotonic() - check.started
        lines = found or [f"{len(check.hosts)} nodes, {check.world} processes are well ({took:.1f} s)"]
        for line in lines:
            print(f"node check: {line}", file=sys.stderr if found else sys.stdout, flush=True)
    return EXIT_BAD_NODE if found else 0


if __name__ == "__main__":
    leave_on_warning()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NCCL and gloo threads of a bad node may never end
