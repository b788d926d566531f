"""How buckets travel between ranks: torch.distributed (gloo, NCCL) or CUDA IPC within a node.

A bucket is one flat tensor for each pair of ranks. `exchange` is a collective: all ranks call it, also those that
send and receive nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> dict[int, Tensor]:
        """Send flat tensors to ranks; give back what was received: `receives` says how many elements from whom.

        All tensors have one dtype. A rank neither sends to itself nor receives from itself.
        """
        ...


class NoTransport:
    """For a world of one rank, where nothing has to travel."""

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> dict[int, Tensor]:
        if sends or receives:
            raise RuntimeError(f"one rank cannot send to {sorted(sends)} or receive from {sorted(receives)}")
        return {}


class ProcessTransport:
    """Point-to-point over a process group: plain tensors with gloo, GPU to GPU with NCCL (NVLink or network)."""

    def __init__(self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._dtype, self._device, self._group = dtype, device, group

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> dict[int, Tensor]:
        into = {r: torch.empty(n, dtype=self._dtype, device=self._device) for r, n in sorted(receives.items())}
        # as bytes: gloo knows no bfloat16
        operations = [dist.P2POp(dist.irecv, t.view(torch.uint8), r, self._group) for r, t in into.items()]
        operations += [dist.P2POp(dist.isend, t.view(torch.uint8), r, self._group) for r, t in sorted(sends.items())]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return into


class CudaIpcTransport:
    """Between processes of one node that see each other's GPUs (or share one): the receiver maps the sender's bucket
    and copies out of it; no staging on the way.

    `control` is a gloo group of the same ranks, over which the handles travel.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> dict[int, Tensor]:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()  # buckets are filled before anyone maps them
        mine = {receiver: reduce_tensor(tensor) for receiver, tensor in sends.items()}
        everyone: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size(self._control))]
        dist.all_gather_object(everyone, mine, group=self._control)
        ranks = dist.get_process_group_ranks(self._control)
        me, got = dist.get_rank(), {}
        for sender, handles in zip(ranks, everyone, strict=True):
            if sender in receives:
                rebuild, arguments = handles[me]
                got[sender] = rebuild(*arguments).to(torch.cuda.current_device(), copy=True)
        torch.cuda.synchronize()
        dist.barrier(group=self._control)  # senders keep their buckets until all have copied
        return got
