"""After a refit: does the engine serve what was sent? Two proofs, each used where it can be had.

- Bit sums: the sum of all values' bit patterns in the engine's dtype. It does not change when rows are fused or a
  kernel reorders values, so it holds for plain parameters and for experts in a kernel's own layout. On CPU builds one
  expert of each layer is compared value by value in that layout too.
- Columns: a few whole columns of a matrix, by position. Where a build keeps nothing but a packed copy of a matrix (CPU
  linear layers), the copy itself is multiplied by unit vectors: one product and zeros, so the result is exact. The
  columns move on with each version, so that successive refits go through all of them.

FP8 weights are compared by the sum of their bytes, which a kernel may reorder, their scales by bit sums in float32.

Under tensor parallelism each rank compares the shards that it serves with the parts of the tensors that it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from pivotrl.generation import vllm_setup
from pivotrl.generation.direct_load import packed_expert
from pivotrl.generation.refit_check import EMBEDDING, HEAD, is_scale
from pivotrl.generation.served import served_parameters
from pivotrl.models.block_fp8 import FP8

if TYPE_CHECKING:
    from torch import Tensor, nn

COLUMNS = 16
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, FP8: torch.int8}


@dataclass(frozen=True)
class RefitReport:
    """Served weights by what was shown of them; `different` holds those that are not what was sent."""

    complete: list[str] = field(default_factory=list)  # every value, by bit sum
    sampled: list[str] = field(default_factory=list)  # `COLUMNS` columns, by position
    unverified: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    non_finite: list[str] = field(default_factory=list)  # Hugging Face names, of those that only a product shows


@dataclass(frozen=True)
class _Sent:
    rows: int
    width: int  # columns of the whole matrix; 0 for a vector
    dtype: torch.dtype  # in which bits are summed: the engine's, or that of FP8 values and of their scales
    bits: int | None
    columns: Tensor | None  # [COLUMNS or fewer, rows]: as the product with unit vectors gives them


class RefitVerifier:
    """Remembers a fingerprint of each tensor sent, then compares with the served model. One per refit."""

    def __init__(self, names: Collection[str], dtype: torch.dtype, version: int) -> None:
        self._dtype = dtype
        self._version = version
        self._sent: dict[str, _Sent] = {}
        experts = {int(match[1]) for name in names if (match := _EXPERT.search(name))}
        self._chosen = version % len(experts) if experts else None  # the expert that is kept whole
        self._whole: dict[str, Tensor] = {}
        self._sums: dict[tuple[int, int], int] = {}  # of served tensors: (place, rows) -> bits

    def sent(self, name: str, tensor: Tensor) -> None:
        """Note what this rank is to serve of a weight (the whole of it, or its shard)."""
        expert = _EXPERT.search(name)
        if tensor.dtype == FP8 or is_scale(name):
            dtype = FP8 if tensor.dtype == FP8 else torch.float32
            total = bit_sum(tensor, dtype, anyorder=dtype == FP8 or expert is not None)
            self._sent[name] = _Sent(tensor.shape[0], 0, dtype, total, None)
            return
        if name.endswith(".A_log"):  # served as the decay that it stands for, in float32
            decay = -torch.exp(tensor.detach().float())
            self._sent[name] = _Sent(len(tensor), 0, torch.float32, bit_sum(decay, torch.float32), None)
            return
        matrix = tensor.ndim == 2
        on_cpu = tensor.device.type == "cpu"
        # CPU builds serve no readable copy of a dense matrix, so its bit sum would have nothing to be compared with
        readable = not on_cpu or not matrix or expert is not None or name == EMBEDDING
        bits = bit_sum(tensor, self._dtype, anyorder=expert is not None) if readable else None
        if expert and on_cpu and int(expert[1]) == self._chosen:
            self._whole[name] = tensor.detach().to(self._dtype, copy=True)
        columns = None
        if matrix:
            sampled = tensor[:, self._columns(tensor.shape[1])].t()
            columns = sampled.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        self._sent[name] = _Sent(tensor.shape[0], tensor.shape[1] if matrix else 0, self._dtype, bits, columns)

    @torch.no_grad()
    def compare(self, model: nn.Module) -> RefitReport:
        """The report for `model`, vLLM's module as served by this process."""
        report = RefitReport()
        self._sums.clear()
        fp8 = any(entry.dtype == FP8 for entry in self._sent.values())
        requantised = fp8 and vllm_setup.requantises_fp8()
        for name, module, _, served, sources in served_parameters(model):
            first = self._sent.get(sources[0])
            if first is not None and first.dtype != self._dtype and (requantised or served.dtype != first.dtype):
                report.unverified.append(name)  # the kernel computes with values of its own making
                continue
            if name == HEAD and HEAD not in self._sent:
                sources = [EMBEDDING]
            if served.ndim == 3 and len(sources) > 1:  # one source: a convolution
                self._compare_experts(report, name, module, served, sources)
            else:
                self._compare_dense(report, name, module, served, sources)
        return report

    def _compare_experts(
        self, report: RefitReport, name: str, module: nn.Module, served: Tensor, sources: list[str]
    ) -> None:
        sent = [self._sent.get(source) for source in sources]
        if any(entry is None or entry.bits is None for entry in sent):
            report.unverified.append(name)
            return
        dtype, experts = sent[0].dtype, served.shape[0]  # type: ignore[union-attr]
        parts = len(sources) // experts
        for e in range(experts):
            want = _wrap(sum(entry.bits for entry in sent[e * parts : (e + 1) * parts]))  # type: ignore[union-attr,misc]
            if bit_sum(served[e], dtype, anyorder=True) != want:
                report.different.append(name)
                return
        if self._chosen is not None and served.device.type == "cpu" and dtype == self._dtype:
            whole = torch.cat([self._whole[s] for s in sources[self._chosen * parts : (self._chosen + 1) * parts]])
            if not torch.equal(packed_expert(module, whole).flatten(), served[self._chosen].flatten()):
                report.different.append(name)
                return
        report.complete.append(name)

    def _compare_dense(
        self, report: RefitReport, name: str, module: nn.Module, served: Tensor, sources: list[str]
    ) -> None:
        found = [self._sent.get(source) for source in sources]
        sent = [entry for entry in found if entry is not None]
        if len(sent) != len(found):
            report.unverified.append(name)
            return
        rows = sum(entry.rows for entry in sent)
        bits = [entry.bits for entry in sent if entry.bits is not None]
        readable = served.numel() > 0
        shown = False
        if readable and len(bits) == len(sent):
            dtype, key = sent[0].dtype, (served.data_ptr(), rows)
            if key not in self._sums:  # a tied head is the embedding, whose sum is known
                self._sums[key] = bit_sum(served[:rows], dtype, anyorder=dtype == FP8)
            if self._sums[key] != _wrap(sum(bits)):
                report.different.append(name)
                return
            shown = True
        columns = [entry.columns for entry in sent if entry.columns is not None]
        if columns:
            want = torch.cat(columns, 1)  # [columns, rows]
            got = self._served_columns(module, served, sent[0].width, readable)
            wrong = [matrix for matrix in got if not torch.equal(matrix[:, :rows], want.to(matrix.device))]
            if wrong:
                report.different.append(name)
                starts = accumulate((entry.rows for entry in sent), initial=0)
                for source, entry, start in zip(sources, sent, starts, strict=False):
                    # a row that holds a NaN or infinity anywhere: times zero it is NaN in every product
                    if not wrong[0][:, start : start + entry.rows].isfinite().all():
                        report.non_finite.append(source)
                return
        (report.complete if shown else report.sampled if columns else report.unverified).append(name)

    def _served_columns(self, module: nn.Module, served: Tensor, width: int, readable: bool) -> list[Tensor]:
        """The sampled columns [columns, rows] of every copy that the module computes with."""
        columns = self._columns(width)
        copies = [served[:, columns].t()] if readable else []
        if hasattr(module, "cpu_linear"):
            unit = torch.zeros(columns.stop - columns.start, width, dtype=self._dtype)  # [columns, width]
            unit[:, columns].fill_diagonal_(1)
            linear: Any = module.cpu_linear
            copies.append(linear(unit, served, None))
        return copies

    def _columns(self, width: int) -> slice:
        start = min(self._version * COLUMNS % width, max(width - COLUMNS, 0))
        return slice(start, min(start + COLUMNS, width))


def bit_sum(tensor: Tensor, dtype: torch.dtype, *, anyorder: bool = False) -> int:
    """Sum (mod 2**64) of the bit patterns of `tensor` as `dtype`; rows may be fused or split.

    `anyorder`: the same for any order of single values, too (a kernel's own layout); else words of eight bytes are
    summed where they fit, which is many times faster.
    """
    values = tensor.detach().to(dtype).contiguous()
    # by shape alone: both sides of a comparison must decide alike (vectors may be fused at any length)
    words = not anyorder and values.ndim == 2 and values.shape[1] * values.element_size() % 8 == 0
    if words and values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    return int(values.view(torch.int64 if words else _BITS[dtype]).sum(dtype=torch.int64).item())


def _wrap(total: int) -> int:
    """A sum of sums as int64 arithmetic would have it."""
    return (total + 2**63) % 2**64 - 2**63
