"""Giving the memory of tensors back and taking it again, to the bit, while every view of them stays valid.

What is released is the storage, not the tensor: megatron-core's parameters, gradients and optimiser states are views
into a few large buffers, and all of them find their values again after `restore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pivotrl.policy.optimizer import members


class Stash:
    """Storages of one kind (say, the optimiser's), kept on the host while their memory is given back.

    Host buffers (pinned with CUDA) are allocated at the first release and used again; `discard`ed storages keep no
    values and come back as zeros.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self._buffers: list[Tensor] = []

    @property
    def released(self) -> bool:
        return bool(self._kept)

    def release(self, tensors: Iterable[Tensor], *, discard: bool = False) -> int:
        """Bytes given back. Raises RuntimeError if this stash holds something already."""
        if self._kept:
            raise RuntimeError("offload: released already; restore() first")
        free = list(self._buffers)
        total = 0
        for storage in distinct_storages(tensors):
            size = storage.nbytes()
            copy = None
            if not discard:
                copy = next((b for b in free if b.numel() == size), None)
                if copy is None:
                    copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                    self._buffers.append(copy)
                else:
                    free = [b for b in free if b is not copy]
                copy.untyped_storage().copy_(storage)
            self._kept.append((storage, size, copy))
            total += size
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are asynchronous
        for storage, _, _ in self._kept:
            storage.resize_(0)
        return total

    def restore(self) -> int:
        """Bytes taken again, with the values that they had."""
        total = 0
        for storage, size, copy in self._kept:
            storage.resize_(size)
            if copy is None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(copy.untyped_storage())
            total += size
        self._kept.clear()
        return total


def distinct_storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage behind the tensors once; empty ones left out."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


class TrainerMemory:
    """A policy's memory by kind: parameters, gradients, optimiser states (main weights included)."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, on_host: tuple[str, ...] = ()) -> None:
        """`on_host`: kinds that `restore` leaves on the host; they come for `stepping` and `resident` alone."""
        self._model, self._optimizer, self._on_host = model, optimizer, on_host
        self._stashes = {"parameters": Stash(), "gradients": Stash(), "optimizer": Stash()}

    def release(self, *kinds: str, keep_gradients: bool = True) -> int:
        """Bytes given back of "parameters", "gradients" and "optimizer". The next training step zeroes gradients
        anyway, so `keep_gradients=False` saves their copy."""
        tensors = {
            "parameters": lambda: [p.data for p in self._model.parameters()],
            "gradients": self._gradients,
            "optimizer": self._states,
        }
        total = 0
        for kind in kinds:
            if not self._stashes[kind].released:
                total += self._stashes[kind].release(
                    tensors[kind](), discard=kind == "gradients" and not keep_gradients
                )
        return total

    def restore(self, *kinds: str) -> int:
        """Bytes taken again."""
        return sum(self._stashes[kind].restore() for kind in kinds if kind not in self._on_host)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within the block the optimiser's state is in its place, wherever it is otherwise."""
        for kind in self._on_host:
            self._stashes[kind].restore()
        yield
        self.release(*self._on_host)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within the block all is in its place (to be saved, say); then what was away goes again."""
        away = self.released
        for kind in away:
            self._stashes[kind].restore()
        yield
        self.release(*{*away, *self._on_host})

    @property
    def released(self) -> list[str]:
        return [kind for kind, stash in self._stashes.items() if stash.released]

    def _gradients(self) -> list[Tensor]:
        found = [getattr(p, name, None) for p in self._model.parameters() for name in ("main_grad", "grad")]
        return [g for g in found if g is not None]

    def _states(self) -> list[Tensor]:
        """Adam's moments and the main weights; not what lies in the parameters' own storage (fp32 policies)."""
        optimizers = [o.optimizer for o in members(self._optimizer)]
        found = [t for o in optimizers for state in o.state.values() for t in state.values() if torch.is_tensor(t)]
        found += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        parameters = {s.data_ptr() for s in distinct_storages(p.data for p in self._model.parameters())}
        return [t for t in found if t.numel() > 1 and t.untyped_storage().data_ptr() not in parameters]
