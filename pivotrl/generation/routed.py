"""Which experts a model's tokens went to, as vLLM gives them back and as the trainer replays them (R3)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.errors import UserError
from pivotrl.models.registry import family_for

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model that have experts, by number."""

    layers: int
    routed: tuple[int, ...]

    @classmethod
    def of_folder(cls, folder: Path) -> RoutedLayers:
        """Of a Hugging Face folder. Raises UserError where no layer has experts."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dims = family_for(config).dims(config)
        routed = tuple(layer for layer in range(dims.layers) if dims.kind(layer) == "moe")
        if not routed:
            raise UserError(f"generation.routed_experts: {folder} is a dense model, which routes nothing; use false")
        return cls(dims.layers, routed)

    def pick(self, experts: np.ndarray | None) -> np.ndarray:
        """[tokens, all layers, k], as vLLM counts (zeros for dense layers) -> [tokens, layers with experts, k].

        Raises UserError where there is nothing, or not of this model.
        """
        if experts is None:
            raise UserError(
                "generation.routed_experts: the engine gives no experts back; a server needs "
                "--enable-return-routed-experts (and VLLM_USE_V2_MODEL_RUNNER=1)"
            )
        if experts.ndim != 3 or experts.shape[1] != self.layers:
            raise UserError(
                f"generation.routed_experts: the engine gave experts of shape {list(experts.shape)}; "
                f"[tokens, {self.layers} layers, k] was expected. Does it serve another model?"
            )
        return experts[:, list(self.routed)]
