"""The plan of a refit: who sends which box of which Hugging Face tensor to whom. Made once per pair of layouts.

Parameters that differ only in layer or expert number and live on the same ranks are moved alike, so the plan is made
for such classes (a few hundred at most) and spread over their parameters only for the rank that carries it out.
Every rank computes the same plan from the same arguments; nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Entry
from pivotrl.refit.layout import Box, EngineLayout, Piece, TrainerLayout, inside, intersection, moved, numel, pieces

BUCKET_BYTES = 512 * 2**20  # of one round, in what the busiest rank sends or receives
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Cut:
    """One box on its way: part of Hugging Face tensor `tensor` of an entry, in both sides' coordinates."""

    tensor: int
    local: Box  # in the sender's megatron shard
    target: Box  # in the receiver's box of the tensor
    size: int  # elements


@dataclass
class _Class:
    """Entries that the same ranks hold and need in the same way."""

    needs: dict[int, list[Box | None]] = field(default_factory=dict)  # engine tensor rank -> box of each tensor
    out: dict[int, list[tuple[int, tuple[Cut, ...]]]] = field(default_factory=dict)  # sender -> [(receiver, cuts)]
    into: dict[int, list[tuple[int, tuple[Cut, ...]]]] = field(default_factory=dict)  # receiver -> [(sender, cuts)]
    sent: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [ranks] elements, to other ranks
    received: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [ranks] elements, from other ranks
    needed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [ranks] elements served
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [ranks] of those, already on the rank


@dataclass(frozen=True)
class Traffic:
    """Elements per rank [ranks]. No refit can receive less than `needed - held`."""

    sent: np.ndarray
    received: np.ndarray
    needed: np.ndarray
    held: np.ndarray

    @property
    def bound(self) -> np.ndarray:
        return self.needed - self.held

    @property
    def ratio(self) -> float:
        """The worst rank's received elements over its lower bound (1.0 where nothing has to move)."""
        worst = np.divide(self.received, self.bound, out=np.ones(len(self.bound)), where=self.bound > 0)
        return float(worst.max()) if not (self.received[self.bound == 0] > 0).any() else float("inf")


@dataclass(frozen=True)
class Step:
    """What one rank does for one entry."""

    name: str  # global megatron name
    entry: Entry
    needs: list[Box | None]  # of this rank; empty if it is no engine rank
    out: list[tuple[int, tuple[Cut, ...]]]
    into: list[tuple[int, tuple[Cut, ...]]]


class RefitPlan:
    """See the module. `table` and `dims` describe the model (`pivotrl.models.mapping.plan`).

    Args:
        bucket_elements: of one round; all entries of a round are exchanged together.
        ranks_per_node: senders on the receiver's own node are preferred.
    """

    def __init__(
        self,
        table: Mapping[str, Entry],
        dims: Dims,
        trainer: TrainerLayout,
        engine: EngineLayout,
        bucket_elements: int = BUCKET_BYTES // 2,
        ranks_per_node: int = RANKS_PER_NODE,
    ) -> None:
        self.trainer, self.engine, self.dims = trainer, engine, dims
        self.world = max(trainer.world, engine.ranks.stop)
        self._node = ranks_per_node
        self._table = table
        self._classes: dict[tuple[object, ...], _Class] = {}
        self._class_of: dict[str, _Class] = {}
        for name, entry in table.items():
            key = self._key(entry)
            if key not in self._classes:
                self._classes[key] = self._plan_class(entry, key)
            self._class_of[name] = self._classes[key]
        self.rounds = self._cut_into_rounds(bucket_elements)

    def _key(self, entry: Entry) -> tuple[object, ...]:
        stage, expert_rank = self.trainer.stage(entry, self.dims), self.trainer.expert_rank(entry, self.dims)
        return (entry.rule, entry.shapes, stage, expert_rank, self.engine.expert_owner(entry.expert, self.dims))

    def _plan_class(self, entry: Entry, key: tuple[object, ...]) -> _Class:
        stage, expert_rank = self.trainer.stage(entry, self.dims), self.trainer.expert_rank(entry, self.dims)
        size = self.trainer.shards(entry)
        made = _Class({t: self.engine.needs(entry, self.dims, t) for t in range(self.engine.tensor)})
        made.sent, made.received, made.needed, made.held = (np.zeros(self.world, np.int64) for _ in range(4))
        for rank in self.engine.ranks:
            boxes = made.needs[self.engine.tensor_rank(rank)]
            made.needed[rank] = sum(numel(box) for box in boxes if box is not None)
        for shard in range(size):
            held = pieces(entry, self.dims, shard, size)
            cuts = {t: _cuts(boxes, held) for t, boxes in made.needs.items()}
            receivers = [rank for rank in self.engine.ranks if cuts[self.engine.tensor_rank(rank)]]
            holders = self.trainer.holders(entry, stage, expert_rank, shard)
            for receiver, sender in self._assign(receivers, holders).items():
                what = cuts[self.engine.tensor_rank(receiver)]
                elements = sum(cut.size for cut in what)
                made.out.setdefault(sender, []).append((receiver, what))
                made.into.setdefault(receiver, []).append((sender, what))
                if sender == receiver:
                    made.held[receiver] += elements
                else:
                    made.sent[sender] += elements
                    made.received[receiver] += elements
        return made

    def _assign(self, receivers: list[int], holders: list[int]) -> dict[int, int]:
        """Receiver -> holder: itself, else one on its node, else any; no holder serves more than its fair share."""
        chosen = {r: r for r in set(receivers) & set(holders)}
        waiting = [r for r in receivers if r not in chosen]
        share = -(-len(waiting) // len(holders))
        load = dict.fromkeys(holders, 0)
        by_node: dict[int, list[int]] = {}
        for holder in holders:
            by_node.setdefault(holder // self._node, []).append(holder)
        far = []
        for receiver in waiting:
            near = by_node.get(receiver // self._node, [])
            best = min(near, key=lambda h: load[h], default=None)
            if best is None or load[best] >= share:
                far.append(receiver)
                continue
            chosen[receiver] = best
            load[best] += 1
        free = [h for level in range(share) for h in holders if load[h] <= level]  # emptiest first
        for receiver, holder in zip(far, free, strict=False):
            chosen[receiver] = holder
        return chosen

    def _cut_into_rounds(self, bucket_elements: int) -> list[list[str]]:
        """Names by round. Stages and expert ranks take turns, so that all of them send all the time."""
        per_rank = max(1, self.dims.experts // self.trainer.expert)

        def turn(name: str) -> tuple[int, ...]:
            entry = self._table[name]
            if entry.layer is None:
                return (-1 if entry.rule.megatron.startswith("embedding.") else self.dims.layers, 0, 0, 0)
            expert = -1 if entry.expert is None else entry.expert
            position = self.trainer.place(entry.layer, self.dims)[1]
            return (position, expert % per_rank if expert >= 0 else -1, entry.layer, expert)

        rounds: list[list[str]] = []
        sent, received = np.zeros(self.world, np.int64), np.zeros(self.world, np.int64)
        for name in sorted(self._table, key=turn):
            move = self._class_of[name]
            sent, received = sent + move.sent, received + move.received
            if not rounds or max(sent.max(), received.max()) > bucket_elements:
                rounds.append([])
                sent, received = move.sent.copy(), move.received.copy()
            rounds[-1].append(name)
        return rounds

    @cached_property
    def traffic(self) -> Traffic:
        totals = [np.zeros(self.world, np.int64) for _ in range(4)]
        for name in self._table:
            move = self._class_of[name]
            for total, part in zip(totals, (move.sent, move.received, move.needed, move.held), strict=True):
                total += part
        return Traffic(*totals)

    def steps(self, rank: int) -> list[list[Step]]:
        """What `rank` does, round by round; entries that it neither holds nor needs are left out."""
        served = rank in self.engine.ranks
        out = []
        for names in self.rounds:
            steps = []
            for name in names:
                move = self._class_of[name]
                sends, receives = move.out.get(rank, []), move.into.get(rank, [])
                if sends or receives:
                    needs = move.needs[self.engine.tensor_rank(rank)] if served else []
                    steps.append(Step(name, self._table[name], needs, sends, receives))
            out.append(steps)
        return out


def _cuts(needs: list[Box | None], held: list[Piece]) -> tuple[Cut, ...]:
    """Common parts of what is needed and what a shard holds."""
    found = []
    for piece in held:
        need = needs[piece.tensor]
        common = None if need is None else intersection(piece.box, need)
        if common is not None and need is not None:
            local = moved(common, piece.box, piece.local)
            found.append(Cut(piece.tensor, local, inside(common, need), numel(common)))
    return tuple(found)
