"""Rotary position embedding as a Hugging Face config has it: kinds, their settings, how far they reach. Pure: no torch.

Definitions are those of transformers (`modeling_rope_utils`), which vLLM shares; `pivotrl.policy.rope` computes them.
What is not known here is refused: a scaling that is left out would shift every position silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.errors import UserError

_ANY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {  # settings of a kind: those that it needs, those that it may have
    "default": (set[str](), set[str]()),
    "linear": ({"factor"}, set[str]()),
    "dynamic": ({"factor"}, set[str]()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        },
    ),
}
KINDS = tuple(_KEYS)
NONE = "none"  # attention that knows no positions: Mamba layers bring the order
_WITHOUT = ("NemotronHForCausalLM",)  # architectures whose attention does not rotate


@dataclass(frozen=True)
class Rope:
    """A rotary embedding. Which of the fields count depends on `kind`."""

    theta: float = 10000.0  # base
    kind: str = "default"
    factor: float = 1.0  # by which positions are scaled
    original: int = 0  # positions of the pretraining ("llama3", "yarn")
    low: float = 1.0  # "llama3": wavelengths above original / low are scaled, those below original / high are not
    high: float = 4.0
    beta_fast: float = 32.0  # "yarn": rotations over `original` positions above which a frequency stays
    beta_slow: float = 1.0  # and below which it is scaled
    truncate: bool = True  # "yarn": the bounds are whole dimensions
    amplitude: float = 1.0  # of cosine and sine: "yarn" sharpens the attention by its square
    reach: int | None = None  # positions; None: the config does not say

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """The embedding of a config, from the newer `rope_parameters` or the older `rope_theta` and `rope_scaling`.

        Raises UserError for a kind or a setting that is not known.
        """
        if any(a in _WITHOUT for a in config.get("architectures") or ()):
            return cls(kind=NONE, reach=config.get("max_position_embeddings"))
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise UserError(f"config.json: rope settings are {given!r}; they must be a mapping with 'rope_type'")
        settings = {key: value for key, value in given.items() if value is not None}
        kind = str(settings.get("rope_type", settings.get("type", "default")))
        if kind not in _KEYS:
            raise UserError(
                f"config.json: rope type '{kind}' is not supported (only {', '.join(KINDS)}); use a model without it"
            )
        needed, optional = _KEYS[kind]
        for problem, keys in (("lacks", needed - set(settings)), ("has", set(settings) - needed - optional - _ANY)):
            if keys:
                raise UserError(f"config.json: rope type '{kind}' {problem} {', '.join(sorted(map(repr, keys)))}")
        if (partial := settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1.0):
            raise UserError(
                f"config.json: 'partial_rotary_factor: {partial}' is not supported; heads rotate as a whole"
            )
        theta, limit = settings.get("rope_theta", config.get("rope_theta")), config.get("max_position_embeddings")
        factor = _number(settings, "factor", 1.0)
        found: dict[str, Any] = {"kind": kind, "factor": factor}
        if theta is not None:
            found["theta"] = float(theta)
        if kind in ("llama3", "yarn"):
            # a model's own key goes before the scaling's, as in transformers
            original = config.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
            original = limit if original is None else original
            if original is None:
                raise UserError(f"config.json: rope type '{kind}' lacks 'original_max_position_embeddings'")
            found["original"] = int(original)
        if kind == "llama3":
            found |= {"low": _number(settings, "low_freq_factor"), "high": _number(settings, "high_freq_factor")}
            if found["low"] >= found["high"]:
                raise UserError("config.json: rope type 'llama3': low_freq_factor must be below high_freq_factor")
        if kind == "yarn":
            found |= {
                "beta_fast": _number(settings, "beta_fast") or 32.0,
                "beta_slow": _number(settings, "beta_slow") or 1.0,
                "truncate": bool(settings.get("truncate", True)),
                "amplitude": _amplitude(settings, factor),
            }
        if limit is not None:
            stretched = {"linear": int(limit * factor), "yarn": int(found.get("original", 0) * factor)}
            found["reach"] = max(int(limit), stretched.get(kind, 0))
        return cls(**found)

    def check(self, length: int) -> None:
        """Raise UserError where sequences of `length` tokens have no position embedding of their own."""
        if self.kind == "dynamic" and self.reach is not None and length > self.reach:
            raise UserError(
                f"model.context_length={length}: rope type 'dynamic' changes all positions with the length of each "
                f"sequence beyond {self.reach}, so that no prefix can be shared there; use at most {self.reach}"
            )


def _number(settings: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise UserError(f"config.json: rope setting '{key}: {value!r}' is not a positive number")
    if key == "factor" and value < 1:
        raise UserError(f"config.json: rope setting 'factor: {value}' must be at least 1")
    return float(value)


def _amplitude(settings: Mapping[str, Any], factor: float) -> float:
    """Of "yarn": as given, or as its paper has it for a factor."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    above, below = _number(settings, "mscale"), _number(settings, "mscale_all_dim")
    return grown(above) / grown(below) if above and below else grown(1.0)
