"""Run under torchrun by test_gpu_refit.py: buckets over NCCL or CUDA IPC arrive whole, of every dtype, both ways.

Argument: "nccl" or "ipc". With fewer GPUs than ranks (IPC) the ranks share one.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from pivotrl.refit.transport import CudaIpcTransport, ProcessTransport, Transport


def bucket(sender: int, receiver: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size, device="cuda") % 97 + 100 * sender + 10 * receiver).to(dtype)


def main(kind: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    control = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(world) if r != rank]
    for dtype in (torch.float32, torch.bfloat16):
        transport: Transport = (
            CudaIpcTransport(control) if kind == "ipc" else ProcessTransport(dtype, torch.device("cuda"))
        )
        for size in (1, 1000, 5_000_001):
            sends = {r: bucket(rank, r, size, dtype) for r in others}
            for _ in range(3):
                got = transport.exchange(sends, dict.fromkeys(others, size))
                assert got.keys() == set(others)
                assert all(torch.equal(t, bucket(r, rank, size, dtype)) for r, t in got.items())
            only_zero = {1: sends[1]} if rank == 0 else {}  # one direction; the others take part and move nothing
            got = transport.exchange(only_zero, {0: size} if rank == 1 else {})
            assert got.keys() == ({0} if rank == 1 else set())
    dist.barrier(group=control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
