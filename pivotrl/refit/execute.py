"""Carrying a refit plan out: cut, pack, exchange and paste, one bucket of every rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pivotrl.refit.layout import Box, whole
from pivotrl.refit.plan import RefitPlan, Step
from pivotrl.refit.transport import Transport


@dataclass(frozen=True)
class Shard:
    """The part of a Hugging Face tensor that an engine rank serves."""

    tensor: Tensor  # the box alone
    box: Box
    full_shape: tuple[int, ...]


Source = Mapping[str, Tensor]  # global megatron name -> this rank's shard
Arrived = Iterator[tuple[str, Tensor | Shard]]


class RankRefit:
    """One rank's part of a plan. `stream` may be called again for every refit."""

    def __init__(self, plan: RefitPlan, rank: int) -> None:
        self.rank = rank
        self._rounds = plan.steps(rank)
        self.received = self.sent = 0  # bytes of the last stream, to and from other ranks

    def stream(self, source: Source, transport: Transport) -> Arrived:
        """(Hugging Face name, whole tensor or this rank's shard of it) of all that this rank's engine needs.

        Collective: every rank must exhaust it, engine rank or not.
        """
        self.received = self.sent = 0
        for steps in self._rounds:
            buckets = self.pack(steps, source)
            arriving = self.expect(steps)
            got = transport.exchange(buckets, arriving)
            self.sent += sum(bucket.nbytes for bucket in buckets.values())
            self.received += sum(bucket.nbytes for bucket in got.values())
            del buckets
            yield from self.paste(steps, source, got)

    def pack(self, steps: list[Step], source: Source) -> dict[int, Tensor]:
        """One flat tensor for each rank that gets something of these entries from here."""
        parts: dict[int, list[Tensor]] = {}
        for step in steps:
            for receiver, cuts in step.out:
                if receiver != self.rank:
                    shard = source[step.name]
                    parts.setdefault(receiver, []).extend(_view(shard, cut.local).reshape(-1) for cut in cuts)
        return {receiver: torch.cat(flat) for receiver, flat in parts.items()}

    def expect(self, steps: list[Step]) -> dict[int, int]:
        """Elements that arrive from each rank."""
        sizes: dict[int, int] = {}
        for step in steps:
            for sender, cuts in step.into:
                if sender != self.rank:
                    sizes[sender] = sizes.get(sender, 0) + sum(cut.size for cut in cuts)
        return sizes

    def paste(self, steps: list[Step], source: Source, got: Mapping[int, Tensor]) -> Arrived:
        read = dict.fromkeys(got, 0)

        def take(sender: int, size: int) -> Tensor:
            start = read[sender]
            read[sender] = start + size
            return got[sender][start : start + size]

        for step in steps:
            if step.into:
                yield from self._paste_entry(step, source, take)

    def _paste_entry(self, step: Step, source: Source, take: Callable[[int, int], Tensor]) -> Arrived:
        arrived: list[list[tuple[Box, Tensor]]] = [[] for _ in step.needs]
        for sender, cuts in step.into:
            for cut in cuts:
                if sender == self.rank:
                    part = _view(source[step.name], cut.local)
                else:
                    part = take(sender, cut.size).view([stop - start for start, stop in cut.target])
                arrived[cut.tensor].append((cut.target, part))
        for name, shape, need, parts in zip(step.entry.hf, step.entry.shapes, step.needs, arrived, strict=True):
            if need is None:
                continue
            tensor = _join([stop - start for start, stop in need], parts, name)
            yield name, tensor if need == whole(shape) else Shard(tensor, need, shape)


def _view(shard: Tensor, box: Box) -> Tensor:
    return shard[tuple(slice(start, stop) for start, stop in box)]


def _join(shape: list[int], parts: list[tuple[Box, Tensor]], name: str) -> Tensor:
    """Parts that tile a box -> the box; no copy where there is one part."""
    total = sum(part.numel() for _, part in parts)
    expected = 1
    for n in shape:
        expected *= n
    if total != expected:
        raise RuntimeError(f"refit: {total} of {expected} elements of {name} arrived: the plan does not cover it")
    if len(parts) == 1:
        return parts[0][1]
    out = parts[0][1].new_empty(shape)
    for box, part in parts:
        _view(out, box).copy_(part)
    return out
