"""Log-probabilities and entropies of targets, without ever holding [tokens, vocabulary] scores.

Scores are computed only for rows that have a target, a block of the vocabulary at a time, and again in the backward. A
block has all rows, so that its part of the head's gradient is one product, written once. The vocabulary may be split
over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_ELEMENTS = 2**23  # scores of one block: 32 MiB in float32
TILE_ELEMENTS = 2**18  # of them worked on at a time on CPU: float32 temporaries then stay in cache
LOWEST = -1e30  # below every score, and finite


@dataclass(frozen=True)
class Tile:
    """Rows [start, stop) of a block, and which pairs have their row and their token in it."""

    start: int
    stop: int
    pairs: Tensor  # indices


@dataclass(frozen=True)
class Block:
    """Tokens [first, last) of this rank's vocabulary, against all rows."""

    first: int
    last: int
    tiles: list[Tile]


def blocks(rows: int, vocabulary: int, pair_row: Tensor, pair_token: Tensor) -> list[Block]:
    """[rows, vocabulary] in blocks of at most BLOCK_ELEMENTS (or one token), as even as can be.

    Pairs whose token is outside [0, vocabulary) are in none. On an accelerator a block is one tile.
    """
    count = -(-vocabulary // max(1, BLOCK_ELEMENTS // max(1, rows)))
    width = max(1, -(-vocabulary // max(1, count)))  # a rank may have padding only
    height = max(1, rows if pair_row.is_cuda else TILE_ELEMENTS // width)
    across, down = -(-vocabulary // width), -(-rows // height)
    mine = ((pair_token >= 0) & (pair_token < vocabulary)).nonzero()[:, 0]
    tile = pair_token[mine] // width * down + pair_row[mine] // height
    tile, order = tile.sort(stable=True)
    mine = mine[order]
    ends = torch.searchsorted(tile, torch.arange(across * down, device=tile.device), right=True).tolist()
    inside = iter([mine[a:b] for a, b in zip([0, *ends][:-1], ends, strict=True)])

    def tiles() -> list[Tile]:
        return [Tile(a, min(a + height, rows), next(inside)) for a in range(0, rows, height)]

    return [Block(a, min(a + width, vocabulary), tiles()) for a in range(0, vocabulary, width)]


def scores(hidden: Tensor, weight: Tensor, parts: list[Block]) -> Iterator[tuple[Block, Tensor]]:
    """Each block and its products [rows, last - first], in the dtype of the weight, in a buffer that is used again."""
    rows, widest = hidden.shape[0], max((b.last - b.first for b in parts), default=0)
    buffer = torch.empty(rows * widest, dtype=weight.dtype, device=weight.device)
    for b in parts:
        out = buffer[: rows * (b.last - b.first)].view(rows, b.last - b.first)
        yield b, torch.mm(hidden, weight[b.first : b.last].t(), out=out)


def _widened(products: Tensor, tile: Tile, temperature: float) -> Tensor:
    """Temperature-scaled scores of a tile in float32; `products` itself where that is its dtype."""
    x = products[tile.start : tile.stop].float()
    return x if temperature == 1.0 else x.div_(temperature)


class _TargetLogProbs(torch.autograd.Function):
    """hidden [U, H], weight [V, H] (this rank's rows), pairs sorted by row -> (log-probs [P], entropies [U]), float32.

    `pair_token` is relative to this rank's first row; tokens outside [0, V) belong to other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, pair_row: Tensor, pair_token: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        # [U] max, sum of exp(score - max), sum of exp(score - max) * (score - max), of the blocks so far
        peak = torch.full((rows,), LOWEST, device=hidden.device)
        total, weighted = (torch.zeros(rows, device=hidden.device) for _ in range(2))
        target = torch.zeros(pair_row.shape[0], device=hidden.device)  # [P] score of the target
        ctx.parts = blocks(rows, weight.shape[0], pair_row, pair_token)
        for block, products in scores(hidden, weight, ctx.parts):
            for tile in block.tiles:
                x, own = _widened(products, tile, temperature), slice(tile.start, tile.stop)
                target[tile.pairs] = x[pair_row[tile.pairs] - tile.start, pair_token[tile.pairs] - block.first]
                _raise_peak(torch.maximum(peak[own], x.amax(-1)), peak[own], total[own], weighted[own])
                e = x.sub_(peak[own, None]).exp()
                total[own] += e.sum(-1)
                weighted[own] += x.mul_(e).sum(-1)
        if dist.get_world_size(group) > 1:
            highest = peak.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            _raise_peak(highest, peak, total, weighted)
            for x in (weighted, total, target):
                dist.all_reduce(x, group=group)
        normaliser = peak + total.log()  # [U] log-sum-exp
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, pair_row, pair_token, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - normaliser[pair_row], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, pair_row, pair_token, normaliser, entropy = ctx.saved_tensors
        by_pair, by_entropy = (None if g is None else g / ctx.temperature for g in grads)  # of products, not scores
        g = torch.zeros(pair_row.shape[0], device=hidden.device) if by_pair is None else by_pair
        by_row = torch.zeros(hidden.shape[0], device=hidden.device).index_add_(0, pair_row, g, alpha=-1)  # [U]
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for block, products in scores(hidden, weight, ctx.parts):
            for tile in block.tiles:
                own = slice(tile.start, tile.stop)
                x = _widened(products, tile, ctx.temperature).sub_(normaliser[own, None])  # log-softmax
                factor = by_row[own, None]
                if by_entropy is not None:  # dH/dscore = -prob * (log prob + H)
                    factor = factor - by_entropy[own, None] * (x + entropy[own, None])
                d = x.exp_().mul_(factor)
                at = (pair_row[tile.pairs] - tile.start, pair_token[tile.pairs] - block.first)
                d.index_put_(at, g[tile.pairs], accumulate=True)
                if products.dtype is not torch.float32:
                    products[own] = d
            grad_hidden += products @ weight[block.first : block.last]
            torch.mm(products.t(), hidden, out=grad_weight[block.first : block.last])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _raise_peak(higher: Tensor, peak: Tensor, total: Tensor, weighted: Tensor) -> None:
    """Sums relative to `peak` [n] -> relative to `higher`, in place."""
    shift = peak - higher
    scale = shift.exp()
    weighted.addcmul_(shift, total).mul_(scale)
    total.mul_(scale)
    peak.copy_(higher)


def target_logprobs(
    hidden: Tensor, weight: Tensor, pair_row: Tensor, pair_token: Tensor, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets and entropies of rows, at a temperature, over all ranks of `group`.

    Args: hidden [U, H]; weight [V, H], this rank's part of the head; pair_row [P] ascending; pair_token [P] relative to
    this rank's first vocabulary row. Returns float32 (log-probs [P], entropies [U]); the gradient of `hidden` is this
    rank's part of the sum over ranks.
    """
    logprobs, entropy = _TargetLogProbs.apply(hidden, weight, pair_row, pair_token, temperature, group)
    return logprobs, entropy
