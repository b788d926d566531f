"""Weights straight into the parameters of a served model, for kinds of layers whose layout is known.

vLLM's own reload copies each weight three times (into a materialised layer, into the kernel's tensors, into the packed
form). Here a weight is packed straight from where it lies; only rows from several places are joined first, and other
dtypes cast, in one workspace. Models with any other kind of layer take vLLM's reload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pivotrl.generation.engine import RefitError
from pivotrl.generation.refit_check import HEAD
from pivotrl.generation.served import Served, served_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

Write = Callable[[Served, Sequence["Tensor"], "Workspace"], None]


class Workspace:
    """Memory for joined rows that is used again for each weight: fresh pages cost as much as the copy itself."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def tensor(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < size or self._bytes.device != like.device:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._bytes[:size].view(dtype).view(*shape)

    def clear(self) -> None:
        self._bytes = None


class DirectLoader:
    """Made once per engine; `start`, then `load` each (name, part) of a refit in any order, then `finish`."""

    def __init__(self, targets: list[tuple[Served, Write]]) -> None:
        self._targets = targets
        self._where = {
            source: (number, place)
            for number, (served, _) in enumerate(targets)
            for place, source in enumerate(served.sources)
        }
        # names of matrices of which nothing is kept but a packed copy
        self.packed = frozenset(
            source
            for served, write in targets
            if write is _write_linear and not served.tensor.numel()
            for source in served.sources
        )
        self._waiting: dict[int, list[Tensor | None]] = {}
        self._workspace = Workspace()

    @classmethod
    def of(cls, model: nn.Module) -> DirectLoader | None:
        """The loader of a model, or None where a layer is of an unknown kind."""
        targets = []
        embedding: Tensor | None = None
        for served in served_parameters(model):
            if served.name == HEAD and served.tensor is embedding:  # tied: nothing of its own
                continue
            if served.name == "model.embed_tokens.weight":
                embedding = served.tensor
            write = _writer(served)
            if write is None:
                return None
            targets.extend(_units(served, write))
        return cls(targets)

    def load(self, name: str, part: Tensor) -> None:
        """Raises RefitError on a shape that does not fit the served parameter."""
        if name not in self._where:  # a tied head that was sent as well
            return
        number, place = self._where[name]
        served, write = self._targets[number]
        parts = self._waiting.setdefault(number, [None] * len(served.sources))
        parts[place] = part
        ready = [p for p in parts if p is not None]
        if len(ready) == len(parts):
            del self._waiting[number]
            write(served, ready, self._workspace)

    def start(self) -> None:
        """Forget what an aborted refit left waiting."""
        self._waiting.clear()

    def finish(self) -> None:
        """Give the workspace back."""
        self._workspace.clear()


def _units(served: Served, write: Write) -> list[tuple[Served, Write]]:
    """What is written at once: a parameter, or one expert of it."""
    if write is not _write_expert:
        return [(served, write)]
    experts = served.tensor.shape[0]
    per = len(served.sources) // experts
    return [
        (served._replace(tensor=served.tensor[e], sources=served.sources[e * per : (e + 1) * per]), write)
        for e in range(experts)
    ]


def _writer(served: Served) -> Write | None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(served.module, "quant_method", None)
    if served.parameter in ("w13_weight", "w2_weight"):
        return _write_expert if _packs_experts(served) else None
    if served.parameter != "weight":
        return None
    if method is None:
        return _write_plain if served.tensor.ndim == 1 else None
    if type(method) is UnquantizedEmbeddingMethod:
        return _write_plain
    if type(method) is UnquantizedLinearMethod and hasattr(served.module, "cpu_linear"):
        return _write_linear
    return None


def _packs_experts(served: Served) -> bool:
    """A CPU kernel that wants every expert packed and nothing padded."""
    kernel: Any = getattr(getattr(served.module.quant_method, "moe_kernel", None), "fused_experts", None)
    if served.tensor.device.type != "cpu" or not hasattr(kernel, "isa") or getattr(kernel, "_use_zentorch", False):
        return False
    moe = served.module.quant_method.moe
    return bool(moe.intermediate_size_per_partition % kernel._intermediate_alignment() == 0)


def packed_expert(module: Any, weight: Tensor) -> Tensor:
    """One expert's fused weight [out, in] in the layout in which this CPU build's kernel wants it."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed: Tensor = cpu_prepack_moe_weight(weight[None], module.quant_method.moe_kernel.fused_experts.isa)
    return packed


def _write_plain(served: Served, parts: Sequence[Tensor], workspace: Workspace) -> None:
    target, row = served.tensor.data, 0
    for part in parts:
        rows = part.shape[0]
        if row + rows > target.shape[0] or part.shape[1:] != target.shape[1:]:
            raise _misfit(served, parts, target.shape)
        target[row : row + rows].copy_(part)
        row += rows


def _write_linear(served: Served, parts: Sequence[Tensor], workspace: Workspace) -> None:
    module = served.module
    fused = joined(parts, module.params_dtype, workspace)
    out = getattr(module, "output_size_per_partition", module.output_size)
    want = (out, getattr(module, "input_size_per_partition", module.input_size))
    if tuple(fused.shape) != want:
        raise _misfit(served, parts, want)
    module.cpu_linear = None  # gives the old packed copy back, whose place the new one takes
    module.weight = torch.nn.Parameter(fused, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)
    if module.weight.numel():  # a kernel that packs nothing computes with the weight itself: it must be the engine's
        module.weight = torch.nn.Parameter(fused.clone(), requires_grad=False)


def _write_expert(served: Served, parts: Sequence[Tensor], workspace: Workspace) -> None:
    fused = joined(parts, served.tensor.dtype, workspace)
    if fused.numel() != served.tensor.numel():
        raise _misfit(served, parts, served.tensor.shape)
    served.tensor.data.copy_(packed_expert(served.module, fused).view(served.tensor.shape))


def joined(parts: Sequence[Tensor], dtype: torch.dtype, workspace: Workspace) -> Tensor:
    """Rows of all parts in one tensor [rows, width] of `dtype`, to be read and not kept.

    Parts that lie one behind the other (the halves of megatron's gate_up) are that tensor already; others are copied
    into the workspace, the cast included.
    """
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    if first.dtype == dtype and _adjacent(parts):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    out = workspace.tensor((rows, *first.shape[1:]), first, dtype)
    row = 0
    for part in parts:
        out[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]
    return out


def _adjacent(parts: Sequence[Tensor]) -> bool:
    place = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.dtype != parts[0].dtype or part.data_ptr() != place:
            return False
        if part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
            return False
        place += part.nbytes
    return True


def _misfit(served: Served, parts: Sequence[Tensor], want: Sequence[int]) -> RefitError:
    shapes = [tuple(part.shape) for part in parts]
    return RefitError(f"refit: {', '.join(served.sources)} of shapes {shapes} do not fit {served.name} {tuple(want)}")
