"""One validate() that tells every conflict at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.validation import conflicts, get, model_shape, validate


@pytest.fixture
def moe(tmp_path: Path) -> str:
    shape = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "num_experts": 16,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def make(**changes: Any) -> Config:
    cfg = Config()
    cfg.environment.name = "outfitters"
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        owner = get(cfg, ".".join(sections)) if sections else cfg
        assert hasattr(owner, leaf), key
        setattr(owner, leaf, value)
    return cfg


def test_defaults_have_no_conflict() -> None:
    assert conflicts(make(), world_size=1, cuda=False) == []


def test_several_conflicts_are_told_together() -> None:
    cfg = make(
        algorithm__group_size=1,
        profile__rollouts_per_turn=1,
        select__lambda_diff=0.0,
        precision__policy="fp16",
        precision__fp8="blockwise",
        parallel__tensor=2,
        sampling__max_new_tokens=4096,
        trajectories__warmup_fraction=0.7,
        trajectories__validation_fraction=0.4,
    )
    with pytest.raises(UserError) as caught:
        validate(cfg, world_size=1, cuda=False)
    text = str(caught.value)
    for part in (
        "group_size=1",
        "rollouts_per_turn=1",
        "lambda_diff",
        "fp16",
        "bf16",
        "GPU",
        "world size 1",
        "no room",
        "1.1",
    ):
        assert part in text
    assert "9 attention heads" in text


@pytest.mark.parametrize(("k", "group"), [(8, 8), (2, 2)])
def test_greedy_sampling_is_a_conflict(k: int, group: int) -> None:
    found = conflicts(
        make(sampling__temperature=0.0, profile__rollouts_per_turn=k, algorithm__group_size=group), cuda=False
    )
    assert any("greedy" in text for text in found)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("algorithm__advantage", "leaveoneout", "leave_one_out"),
        ("algorithm__aggregation", "token", "token_mean"),
        ("tracking__wandb", "of", "offline"),
        ("select__set", "advv", "adv"),
        ("precision__fp8", "mxfp9", "mxfp8"),
        ("algorithm__optimizer__schedule", "cosine", "linear"),
        ("evaluate__policies", ["bas"], "base"),
        ("run__stages", ["trian"], "train"),
        ("run__stages", ["select", "profile"], "must come before"),
        ("run__stages", ["turns", "turns"], "twice"),
        ("select__lambda_diff", 1.01, "(0, 1]"),
        ("select__rank", "signl", "signal"),
        ("select__max_per_trajectory", 0, "must be positive"),
        ("select__mixture", {"retail": "ten"}, "select.mixture.retail"),
        ("select__action_floor", 1.5, "select.action_floor=1.5 must be in [0, 1]"),
        ("sampling__top_p", 0.0, "top_p"),
        ("sampling__temperature", -1.0, "temperature"),
        ("algorithm__clip_low", 1.0, "clip_low"),
        ("algorithm__kl_beta", -0.1, "kl_beta"),
        ("algorithm__optimizer__learning_rate", 0.0, "learning_rate"),
        ("sft__optimizer__beta2", 1.0, "sft.optimizer.beta2"),
        ("parallel__sequence", True, "parallel.sequence"),
        ("parallel__expert", 2, "no experts"),
        ("parallel__virtual_pipeline", 2, "virtual_pipeline=2 needs parallel.pipeline > 1"),
        ("parallel__virtual_pipeline", 0, "must be positive"),
        ("experts__aux_loss", 1e-4, "no experts to balance"),
        ("experts__aux_loss", -1.0, "must not be negative"),
        ("sft__optimizer__overlap_param_gather", True, "needs sft.optimizer.overlap_grad_reduce=true"),
        ("algorithm__optimizer__cpu_offload", True, "algorithm.optimizer.cpu_offload=true frees GPU memory"),
        ("warmup__optimizer__cpu_offload", True, "warmup.optimizer.cpu_offload=true frees GPU memory"),
        ("generation__tensor_parallel", 2, "generation.tensor_parallel"),
        ("model__context_length", 100, "no room"),
        ("model__context_length", 10_000, "8192 positions"),
        ("model__path", "/nowhere", "no such folder"),
        ("evaluate__ood_path", "/nowhere.jsonl", "no such file"),
        ("trajectories__path", "/nowhere/*.jsonl", "no match"),
    ],
)
def test_each_conflict(key: str, value: Any, part: str) -> None:
    found = conflicts(make(**{key: value}), world_size=1, cuda=False)
    assert any(part in text for text in found), found


def test_a_floor_needs_a_set_of_low_means() -> None:
    assert conflicts(make(select__action_floor=0.5), world_size=1, cuda=False) == []
    found = conflicts(make(select__action_floor=0.5, select__set="mixed"), world_size=1, cuda=False)
    assert found == ["select.action_floor widens adv and adv_zeros; select.set=mixed has every mixed turn already"]


def test_nothing_to_learn_from_says_what_to_give() -> None:
    found = conflicts(Config(), world_size=1, cuda=False)
    assert len(found) == 1
    assert "trajectories.path=" in found[0]


def test_step_batch_must_divide_over_data_parallel_ranks_with_all_numbers() -> None:
    found = conflicts(make(algorithm__pivots_per_step=5), "train", world_size=2, cuda=False)
    assert found == ["algorithm.pivots_per_step=5 is not a multiple of the data-parallel size 2 (world 2 / 1)"]


def layout(world: int, model: str, **sizes: Any) -> list[str]:
    changes = {f"parallel__{k}": v for k, v in sizes.items()}
    return conflicts(make(model__path=model, **changes), "train", world_size=world, cuda=False)


@pytest.mark.parametrize(
    ("world", "sizes", "part"),
    [
        (2, {"tensor": 2}, "needs parallel.sequence=true"),
        (16, {"tensor": 16, "sequence": True}, "8 attention heads"),
        (4, {"pipeline": 4}, "6 layers"),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, "does not divide the 3 layers of a pipeline stage"),
        (32, {"expert": 32}, "16 experts"),
        (16, {"tensor": 8, "pipeline": 4}, "= 32 does not divide the world size 16"),
        (4, {"expert": 8}, "expert 8 x pipeline 1 = 8 does not divide the world size 4"),
    ],
)
def test_layout_conflicts(moe: str, world: int, sizes: dict[str, Any], part: str) -> None:
    found = layout(world, moe, **sizes)
    assert any(part in text for text in found), found


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {}),
        (8, {"tensor": 8, "sequence": True}),
        (4, {"tensor": 2, "sequence": True, "expert": 2}),
        (8, {"pipeline": 2, "expert": 4}),
        (2, {"pipeline": 2, "virtual_pipeline": 3}),
    ],
)
def test_layouts_that_fit(moe: str, world: int, sizes: dict[str, Any]) -> None:
    assert layout(world, moe, **sizes) == []


def test_world_size_comes_from_the_environment(moe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert any("world size 3" in t for t in conflicts(make(model__path=moe, parallel__pipeline=2), "train", cuda=False))


def test_stage_without_a_policy_does_not_mind_the_layout() -> None:
    cfg = make(parallel__tensor=8, precision__fp8="blockwise", generation__tensor_parallel=8, model__path="/nowhere")
    assert conflicts(cfg, "turns", world_size=1, cuda=False) == []
    assert conflicts(cfg, "train", world_size=1, cuda=False) != []


def test_fp8_is_fine_with_a_gpu() -> None:
    cfg = make(precision__fp8="blockwise", algorithm__optimizer__cpu_offload=True)
    assert conflicts(cfg, "train", world_size=1, cuda=True) == []


@pytest.mark.parametrize("write", [lambda p: None, lambda p: p.write_text("{"), lambda p: p.mkdir()])
def test_unreadable_model_config_is_no_shape(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "config.json")
    assert model_shape(str(tmp_path)) is None


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"num_attention_heads": 4, "num_hidden_layers": 2}})
    )
    shape = model_shape(str(tmp_path))
    assert shape is not None
    assert (shape.heads, shape.kv_heads, shape.layers, shape.experts) == (4, 4, 2, 0)
