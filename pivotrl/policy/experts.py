"""Routers of a mixture of experts in RL: replay of the generator's choices, how even the load is, frozen routers.

Replay (R3, arXiv 2510.11370): the engine says which experts each token went to, and the trainer sends it to the same
ones, so that both compute the same function; weights of the chosen experts still come from the trainer's own scores, so
the gradient reaches the router. The choices travel with the tree: the attention of a layer, which runs before its
router in the forward and again in a recomputed one, hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pivotrl.policy.prefix_tree import Ints


class Router:
    """What one router is told and counts; megatron-core's router asks it for the top k (`router_replay`)."""

    def __init__(self, layer: int, place: int, experts: int, module: Any) -> None:
        self.layer, self.place, self.module = layer, place, module  # `place` among the model's layers with experts
        self.choices: Tensor | None = None  # [rows of this rank, k]; -1: the router's own
        self.load = torch.zeros(experts, dtype=torch.int64)

    def replay(self, choices: Tensor | None) -> None:
        """Follow a tree's choices [rows of this rank, layers with experts, k]; None: the router's own."""
        self.choices = None if choices is None else choices[:, self.place]

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
        if self.choices is None:
            return values, own
        chosen = torch.where(self.choices >= 0, self.choices.to(own), own)
        return scores.gather(1, chosen), chosen

    def count(self, module: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        """Forward hook. A recomputed forward has a gradient and its first run has none, so each is counted once."""
        if module.training and torch.is_grad_enabled():
            self.load = self.load.to(outputs[1].device) + outputs[1].sum(0)


class Routers:
    """The routers of one rank's model. Empty for dense models."""

    def __init__(self, chunks: Sequence[Any], moe: tuple[bool, ...], train: bool) -> None:
        self.number = sum(moe)
        self.mine: list[Router] = []
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            module = getattr(layer.mlp, "router", None)
            if module is None:
                continue
            number = layer.layer_number - 1  # over all pipeline stages
            router = Router(number, sum(moe[:number]), module.num_experts, module)
            module.router_replay = router
            module.register_forward_hook(router.count)
            layer.self_attention.core_attention.router = router
            module.weight.requires_grad_(train)
            self.mine.append(router)

    def take_load(self, device: torch.device) -> dict[str, float]:
        """{"expert_load": tokens of the busiest expert over the mean, averaged over layers, "expert_load_max": of the
        worst layer} since the last call; {} for dense models. All ranks call it. Padding rows count: they are work too.
        """
        if not self.number:
            return {}
        experts = len(self.mine[0].load) if self.mine else 0
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, {r.layer: r.load.tolist() for r in self.mine})
        total: dict[int, list[int]] = {}
        for part in sizes:
            for layer, load in part.items():
                before = total.get(layer, [0] * len(load))
                total[layer] = [a + b for a, b in zip(before, load, strict=True)]
        for router in self.mine:
            router.load = torch.zeros(experts, dtype=torch.int64, device=device)
        ratios = [max(load) * len(load) / sum(load) for load in total.values() if sum(load)]
        return {"expert_load": sum(ratios) / len(ratios), "expert_load_max": max(ratios)} if ratios else {}


def local_choices(experts: Ints, rows: Ints, rank: int, size: int, device: torch.device) -> Tensor:
    """Choices of the rows that this rank's routers see: [rows / size, layers, k].

    Args: `experts` [S, layers, k] of the tree; `rows` of the context-parallel rank; with sequence parallelism its
    `rank` of `size` tensor-parallel ranks has one contiguous part of them.
    """
    return torch.from_numpy(experts[rows]).chunk(size)[rank].to(device)
