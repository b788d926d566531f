"""Rotary embeddings against transformers, and settings that must not be ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pivotrl.errors import UserError
from pivotrl.models.rope import Rope
from pivotrl.policy.rope import inverse_frequencies, rope_tables
from pivotrl.validation import model_shape

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "yarn of Qwen3": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, everything given": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.1,
        "mscale_all_dim": 0.7,
    },
    "yarn, amplitude given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_tables_are_those_of_transformers_to_the_bit(case: str, theta: float) -> None:
    config = {"max_position_embeddings": 40960, "rope_parameters": {**CASES[case], "rope_theta": theta}}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=512, num_attention_heads=4, **config))
    ids = torch.tensor([0, 1, 7, 500, 32768, 40959])
    cosine, sine = theirs(torch.zeros(1, 6, 512), ids[None])
    rope = Rope.of(config)
    for ours, wanted in zip(rope_tables(ids, 128, rope, torch.float32), (cosine, sine), strict=True):
        assert torch.equal(ours, wanted[0])
    plain = inverse_frequencies(Rope(theta), 128)
    assert torch.equal(plain, inverse_frequencies(rope, 128)) == (rope.kind in ("default", "dynamic"))


def test_older_names_and_what_a_config_leaves_out() -> None:
    assert Rope.of({"rope_theta": 5e5}) == Rope(5e5)
    assert Rope.of({}).theta == 1e4
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": None}}
    found = Rope.of({**old, "max_position_embeddings": 32768})
    assert (found.original, found.reach, found.amplitude) == (32768, 131072, pytest.approx(1.1386294361119891))
    # a model's own key goes before the scaling's, as in transformers
    assert Rope.of({**old, "max_position_embeddings": 9, "original_max_position_embeddings": 5}).original == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope type 'longrope' is not supported"),
        ("yarn", "must be a mapping"),
        ({"rope_type": "yarn"}, "lacks 'factor'"),
        ({"rope_type": "yarn", "factor": 4.0}, "lacks 'original_max_position_embeddings'"),
        ({"rope_type": "linear", "factor": 4.0, "mrope_section": [1, 2]}, "has 'mrope_section'"),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}, "has 'alpha'"),
        ({"rope_type": "linear", "factor": 0.5}, "'factor: 0.5' must be at least 1"),
        ({"rope_type": "linear", "factor": "4"}, "'factor: '4'' is not a positive number"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({**LLAMA3, "low_freq_factor": 4.0, "original_max_position_embeddings": 8}, "must be below"),
        ({"full_attention": {"rope_type": "default"}}, "has 'full_attention'"),
    ],
)
def test_what_is_not_known_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rope.of({"rope_parameters": settings})


def test_a_partly_rotated_head_is_refused_wherever_it_is_written() -> None:
    with pytest.raises(UserError, match=r"partial_rotary_factor: 0\.25"):
        Rope.of({"partial_rotary_factor": 0.25, "rope_theta": 1e4})


def test_dynamic_is_refused_beyond_its_positions(tmp_path: Any) -> None:
    rope = Rope.of({"max_position_embeddings": 64, "rope_parameters": CASES["dynamic"]})
    rope.check(64)
    with pytest.raises(UserError, match=r"context_length=65: rope type 'dynamic'.*use at most 64"):
        rope.check(65)


def test_scaling_stretches_what_the_configuration_allows(tmp_path: Any) -> None:
    for kind, reach in (("yarn", 131072), ("linear", 163840), ("dynamic", 40960), ("default", 40960)):
        scaling = CASES["yarn of Qwen3" if kind == "yarn" else kind]
        text = LlamaConfig(
            max_position_embeddings=40960, rope_parameters={**scaling, "rope_theta": 1e6}
        ).to_json_string()
        (tmp_path / "config.json").write_text(text)
        shape = model_shape(str(tmp_path))
        assert shape is not None and shape.positions == reach, kind
