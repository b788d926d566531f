"""What the ranks of a launch tell each other about saving and stopping. A process alone talks to nobody."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def join() -> None:
    """Start torch.distributed, once a process: with the peers that torchrun or srun names, or alone."""
    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def everyone(value: T) -> list[T]:
    """The value of every rank, on every rank."""
    if world() == 1:
        return [value]
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def of_first(value: T) -> T:
    """The value of rank 0, on every rank."""
    if world() == 1:
        return value
    values: list[T] = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def to_first(value: T) -> list[T]:
    """The value of every rank, on rank 0; nothing elsewhere."""
    if world() == 1:
        return [value]
    values: list[T | None] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(value, values)
    return values or []  # type: ignore[return-value]


def highest(numbers: list[int]) -> list[int]:
    """Element-wise maximum over ranks."""
    if world() == 1:
        return numbers
    tensor = torch.tensor(numbers)  # on CPU: gloo, also where the GPUs use NCCL
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [int(n) for n in tensor]


def wait() -> None:
    """Until every rank is here."""
    if world() > 1:
        highest([0])
