"""Log-probabilities and entropies of targets, without ever holding [tokens, vocabulary] scores.

Scores are computed only for rows that have a target, a chunk of rows at a time, and again in the backward. The
vocabulary may be split over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 2**24  # float32 scores of one chunk: 64 MiB


def chunks(rows: int, vocabulary: int) -> list[tuple[int, int]]:
    """Row ranges whose scores have at most CHUNK_ELEMENTS elements (one row at least)."""
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return [(a, min(a + step, rows)) for a in range(0, rows, step)]


def scores(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Temperature-scaled logits [rows, vocabulary] in float32; the product itself runs in the dtype of the weight."""
    logits = F.linear(hidden, weight).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TargetLogProbs(torch.autograd.Function):
    """hidden [U, H], weight [V, H] (this rank's rows), pairs sorted by row -> (log-probs [P], entropies [U]), float32.

    `pair_token` is relative to this rank's first row; tokens outside [0, V) belong to other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, pair_row: Tensor, pair_token: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        # [U] max, sum of exp, sum of exp * score
        peak, total, weighted = (torch.zeros(rows, device=hidden.device) for _ in range(3))
        target = torch.zeros(pair_row.shape[0], device=hidden.device)  # [P] score of the target
        mine = (pair_token >= 0) & (pair_token < vocabulary)
        ctx.spans = []
        for a, b in chunks(rows, vocabulary):
            p, q = torch.searchsorted(pair_row, torch.tensor([a, b], device=pair_row.device)).tolist()
            ctx.spans.append((a, b, p, q))
            x = scores(hidden[a:b], weight, temperature)
            target[p:q] = x[pair_row[p:q] - a, pair_token[p:q].clamp(0, vocabulary - 1)].where(mine[p:q], 0.0)
            peak[a:b] = x.amax(-1)
            x.sub_(peak[a:b, None])
            e = x.exp()
            total[a:b] = e.sum(-1)
            weighted[a:b] = torch.linalg.vecdot(e, x)
        highest = peak
        if dist.get_world_size(group) > 1:
            highest = peak.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            shift = peak - highest
            weighted, total = (weighted + shift * total) * shift.exp(), total * shift.exp()
            for x in (weighted, total, target):
                dist.all_reduce(x, group=group)
        normaliser = highest + total.log()  # [U] log-sum-exp
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, pair_row, pair_token, mine, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - normaliser[pair_row], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, pair_row, pair_token, mine, normaliser, entropy = ctx.saved_tensors
        by_pair, by_entropy = grads
        g = torch.zeros(pair_row.shape[0], device=hidden.device) if by_pair is None else by_pair
        by_row = torch.zeros(hidden.shape[0], device=hidden.device).index_add_(0, pair_row, g)  # [U]
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device)
        for a, b, p, q in ctx.spans:
            x = scores(hidden[a:b], weight, ctx.temperature).sub_(normaliser[a:b, None])  # log-softmax
            factor = by_row[a:b, None]
            if by_entropy is not None:  # dH/dscore = -prob * (log prob + H)
                factor = factor + by_entropy[a:b, None] * (x + entropy[a:b, None])
            d = x.exp_().mul_(factor).neg_()
            keep = mine[p:q]
            d.index_put_((pair_row[p:q][keep] - a, pair_token[p:q][keep]), g[p:q][keep], accumulate=True)
            d = d.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[a:b] = d @ weight
            grad_weight += d.t() @ hidden[a:b]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


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
