"""Routers of a mixture of experts in RL: replay of the generator's choices, how even the load is, frozen routers.

Replay (R3, arXiv 2510.11370): the engine says which experts each token went to, and the trainer sends it to the same
ones, so that both compute the same function; weights of the chosen experts still come from the trainer's own scores, so
the gradient reaches the router. The choices travel with the tree: the attention of a layer, which runs before its
router in the forward and again in a recomputed one, hands them over.

Load balancing (Switch Transformer): for each layer coefficient * E * sum over experts of share of choices * mean
probability, over the rows of one micro-batch of a data-parallel replica, micro-batches weighted by their rows. It
depends on how the batch is cut into micro-batches, as the losses of the objective never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pivotrl.config import Experts
from pivotrl.policy.prefix_tree import Ints


@dataclass(frozen=True)
class Balance:
    """What the load-balancing loss of one tree needs."""

    weights: Tensor  # [rows of this rank's routers] 1 / rows of the whole step; 0 for padding
    group: Any  # the ranks that share the tree's rows


class _WithLoss(torch.autograd.Function):
    """`values` as they are; the backward adds the gradient of `loss`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


class Router:
    """What one router is told and counts; megatron-core's router asks it for the top k (`router_replay`)."""

    def __init__(self, layer: int, place: int, experts: int, module: Any, coefficient: float = 0.0) -> None:
        self.layer, self.place, self.module = layer, place, module  # `place` among the model's layers with experts
        self.choices: Tensor | None = None  # [rows of this rank, k]; -1: the router's own
        self.load = torch.zeros(experts, dtype=torch.int64)
        self.coefficient = coefficient  # of the load-balancing loss
        self.balance: Balance | None = None
        self.imbalance = torch.zeros(())  # this rank's part of E * sum of share * probability: 1 is even

    def replay(self, choices: Tensor | None, balance: Balance | None = None) -> None:
        """Follow a tree's choices [rows of this rank, layers with experts, k]; None: the router's own."""
        self.choices = None if choices is None else choices[:, self.place]
        self.balance = balance

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) [rows, k] of the chosen experts. The signature is megatron-core's."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.choices is not None:
            own = torch.where(self.choices >= 0, self.choices.to(own), own)
            values = scores.gather(1, own)
        if self.balance is not None and self.module.training and torch.is_grad_enabled():
            uneven = self._unevenness(scores, own, self.balance)
            self.imbalance = self.imbalance.to(uneven.device) + uneven.detach()
            values = _WithLoss.apply(values, self.coefficient * uneven)
        return values, own

    @staticmethod
    def _unevenness(scores: Tensor, chosen: Tensor, balance: Balance) -> Tensor:
        """This rank's part of E * sum over experts of (share of choices * probability summed by weight): float32."""
        experts, weights = scores.shape[1], balance.weights  # [rows]
        counts = torch.zeros(experts, dtype=torch.float32, device=scores.device)
        counts.index_add_(0, chosen.reshape(-1), weights.repeat_interleave(chosen.shape[1]))
        dist.all_reduce(counts, group=balance.group)
        shares = counts / counts.sum().clamp_min(torch.finfo(torch.float32).tiny)
        probabilities = scores.float().softmax(-1)  # [rows, E]
        return experts * ((weights @ probabilities) * shares).sum()

    def count(self, module: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        """Forward hook. A recomputed forward has a gradient and its first run has none, so each is counted once."""
        if module.training and torch.is_grad_enabled():
            self.load = self.load.to(outputs[1].device) + outputs[1].sum(0)


class HandOver(torch.nn.Module):
    """In the place of the attention of a layer that has experts alone: tells its router what the tree says."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.router: Router | None = None

    def forward(self, hidden_states: Tensor, packed_seq_params: Any = None, **_: Any) -> Tensor:
        if self.router is not None:
            self.router.replay(packed_seq_params.experts, packed_seq_params.balance)
        return hidden_states


class Routers:
    """The routers of one rank's model. Empty for dense models."""

    def __init__(self, chunks: Sequence[Any], moe: tuple[bool, ...], settings: Experts) -> None:
        self.number, self.aux_loss = sum(moe), settings.aux_loss
        self.mine: list[Router] = []
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            module = getattr(layer.mlp, "router", None)
            if module is None:
                continue
            number = layer.layer_number - 1  # over all pipeline stages
            router = Router(number, sum(moe[:number]), module.num_experts, module, settings.aux_loss)
            module.router_replay = router
            module.register_forward_hook(router.count)
            # a layer that is experts alone has a HandOver where its attention would be
            getattr(layer.self_attention, "core_attention", layer.self_attention).router = router
            module.weight.requires_grad_(settings.train_router)
            self.mine.append(router)

    def take_load(self, device: torch.device) -> dict[str, float]:
        """{"expert_load": tokens of the busiest expert over the mean, averaged over layers, "expert_load_max": of the
        worst layer} since the last call; {} for dense models. All ranks call it. Padding rows count: they are work too.

        With a load-balancing loss also "aux_loss": what it adds to the loss.
        """
        if not self.number:
            return {}
        experts = len(self.mine[0].load) if self.mine else 0
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, {r.layer: (r.load.tolist(), float(r.imbalance)) for r in self.mine})
        total: dict[int, list[int]] = {}
        imbalance = 0.0
        for part in sizes:
            for layer, (load, uneven) in part.items():
                before = total.get(layer, [0] * len(load))
                total[layer] = [a + b for a, b in zip(before, load, strict=True)]
                imbalance += uneven
        for router in self.mine:
            router.load = torch.zeros(experts, dtype=torch.int64, device=device)
            router.imbalance = torch.zeros((), device=device)
        ratios = [max(load) * len(load) / sum(load) for load in total.values() if sum(load)]
        found = {"aux_loss": self.aux_loss * imbalance} if self.aux_loss else {}
        return found | ({"expert_load": sum(ratios) / len(ratios), "expert_load_max": max(ratios)} if ratios else {})


def of_routers(values: Any, rows: Ints, rank: int, size: int, device: torch.device) -> Tensor:
    """What belongs to the rows that this rank's routers see: [rows / size, ...].

    Args: `values` [S, ...] of the tree; `rows` of the context-parallel rank; with sequence parallelism its
    `rank` of `size` tensor-parallel ranks has one contiguous part of them.
    """
    return torch.from_numpy(values[rows]).chunk(size)[rank].to(device)
