"""Strict composition: nothing that the schema does not know gets through, and every fault is told with its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pivotrl import configuration, strict
from pivotrl.config import Config
from pivotrl.configuration import config_dir, differences, load_config, save_resolved, subset, upgraded
from pivotrl.errors import UserError

GROUPS = sorted((file.parent.name, file.stem) for file in config_dir().glob("*/*.yaml"))
PLACEHOLDERS = ["model.path=/nowhere", "trajectories.path=/nowhere.jsonl", "environment.options.user=null"]


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(overrides)
    return str(caught.value)


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_every_shipped_group_composes(group: str, choice: str) -> None:
    assert isinstance(load_config([f"{group}={choice}", *PLACEHOLDERS]), Config)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize("key", ["algorithm.clip_hgh", "grpo.clip_hgh", "clip_high"])
def test_unknown_key_suggests_the_nearest(prefix: str, key: str) -> None:
    text = message(f"{prefix}{key}=0.3")
    assert f"'{key}'" in text
    assert "did you mean 'algorithm.clip_high'?" in text


def test_all_unknown_keys_are_told_together() -> None:
    text = message("++algorithm.clip_hgh=0.3", "sampling.temprature=1", "modle=x", "model=qwen4", "seed=1,2", "~seed")
    for part in ("clip_high", "sampling.temperature", "'modle'", "no such model", "sweep", "deletes", "6 errors"):
        assert part in text


def test_unknown_choice_lists_and_suggests() -> None:
    text = message("domain=tau")
    assert "Did you mean 'tau2'?" in text
    assert "conversational, outfitters, search, shell_tasks, swe, tau2, terminal" in text


def test_misspelt_group_suggests() -> None:
    assert "'algorithm'" in message("algoritm=grpo")


def test_wrong_types_are_told_together_with_their_override() -> None:
    text = message(
        "profile.rollouts_per_turn=1.5", "algorithm.clip_high=abc", "parallel.sequence=1", "run.stages=turns"
    )
    assert "'profile.rollouts_per_turn': expected integer, got number 1.5" in text
    assert "'algorithm.clip_high': expected number, got text 'abc' (override 'algorithm.clip_high=abc')" in text
    assert "'parallel.sequence': expected true or false, got integer 1" in text
    assert "'run.stages': expected list of text, got text 'turns'" in text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_non_finite_numbers_are_refused(value: str) -> None:
    assert "finite" in message(f"algorithm.kl_beta={value}")


def test_missing_value_names_key_and_file() -> None:
    text = message("experiment=tau2")
    assert "'trajectories.path' has no value" in text
    assert "'model.path' has no value" in text
    assert "tau2.yaml" in text
    assert "qwen3_30b_a3b.yaml" in text


def test_unreadable_override_is_named() -> None:
    assert "override 'x=[1' cannot be read" in message("x=[1")


@pytest.mark.parametrize("override", ["seed={x: 1}", "model.path.x=1", "algorithm={clip_high: 0.3}", "hydra.run.dir=x"])
def test_odd_overrides_are_user_errors(override: str) -> None:
    assert override.split("=")[0] in message(override)


def test_values_and_types_of_overrides() -> None:
    cfg = load_config(
        [
            "algorithm.clip_high=1",
            "++seed=7",
            "+tracking.name=42",
            "profile.max_turns=null",
            "run.stages=[turns,select]",
        ]
    )
    assert cfg.algorithm.clip_high == 1.0
    assert isinstance(cfg.algorithm.clip_high, float)
    assert (cfg.seed, cfg.tracking.name, cfg.profile.max_turns) == (7, "42", None)
    assert cfg.run.stages == ["turns", "select"]


def test_free_mapping_takes_any_key_and_interpolation_sees_defaults() -> None:
    cfg = load_config(
        ["domain.verifier.options.text=exact", "model.name=${domain.name}", "generation.max_mismatch=0.5"]
    )
    assert cfg.domain.verifier.options == {"text": "exact"}
    assert cfg.model.name == cfg.domain.name


def test_command_line_beats_experiment_and_experiment_beats_groups() -> None:
    assert load_config(["experiment=demo"]).domain.name == "outfitters"
    assert load_config(["experiment=demo"]).environment.name == "outfitters"
    assert load_config(["experiment=demo"]).model.context_length == 2048
    assert load_config(["experiment=demo", "domain=tau2"]).domain.name == "tau2"
    assert load_config(["experiment=tau2", "model=smollm2_135m", "trajectories.path=x"]).model.name == "smollm2_135m"


def test_released_recipe_differs_from_the_paper_as_documented() -> None:
    paper, nvidia = load_config(["algorithm=grpo"]).algorithm, load_config(["algorithm=grpo_nvidia"]).algorithm
    assert (paper.advantage, paper.clip_low, paper.clip_high, paper.importance_correction) == (
        "group",
        0.2,
        0.2,
        "none",
    )
    assert (nvidia.advantage, nvidia.clip_low, nvidia.clip_high) == ("leave_one_out", 0.2, 0.28)
    assert (nvidia.importance_correction, nvidia.importance_cap, nvidia.kl_beta) == ("truncated", 5.0, 0.0)


def test_relative_paths_mean_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(["trajectories.path=data/*.jsonl", "run_dir=runs/x", "model.path=m", "evaluate.ood_path=o.jsonl"])
    assert cfg.trajectories.path == str(tmp_path / "data/*.jsonl")
    assert cfg.run_dir == str(tmp_path / "runs/x")
    assert cfg.model.path == str(tmp_path / "m")
    assert cfg.evaluate.ood_path == str(tmp_path / "o.jsonl")
    assert load_config().model.path == "builtin:smollm2-135m"


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    return tmp_path


def own(folder: Path, text: str) -> str:
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text, encoding="utf-8")
    return f"hydra.searchpath=[file://{folder}]"


def test_own_groups_work(own_groups: Path) -> None:
    path = own(own_groups, "defaults:\n  - override /domain: tau2\nseed: 5\n")
    cfg = load_config([path, "experiment=mine"])
    assert (cfg.seed, cfg.domain.name) == (5, "tau2")


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("algorithm:\n  clip_hgh: 0.3\n  stepz: 3\n", ["clip_high", "algorithm.steps", "mine.yaml:3", "mine.yaml:4"]),
        ("algorithm:\n  steps: many\n", ["'algorithm.steps': expected integer, got text 'many'", "mine.yaml:3"]),
        ("defaults:\n  - overide /domain: tau2\n", ["'overide' is no keyword", "'override'"]),
        ("defaults:\n  - optoinal /domain: tau2\n", ["'optoinal' is no keyword", "'optional'"]),
        ("defaults:\n  - optional /domian: tau2\n", ["no group 'domian'", "'domain'"]),
        ("defaults:\n  - override /domain: tau3\n", ["tau3"]),
        ("a: [1\n", ["mine.yaml is no YAML"]),
        ("seed: ${sed}\n", ["sed"]),
        (
            "environment:\n  options:\n    user:\n      base_url: ???\n    domain: ???\n",
            [
                "'environment.options.user.base_url' has no value",
                "'environment.options.domain' has no value",
                "mine.yaml",
            ],
        ),
    ],
)
def test_faults_in_yaml_files_are_told(own_groups: Path, yaml_text: str, expected: list[str]) -> None:
    text = message(own(own_groups, yaml_text), "experiment=mine")
    for part in expected:
        assert part in text


def test_resolved_config_round_trips(tmp_path: Path) -> None:
    cfg = load_config(["experiment=demo", "algorithm.optimizer.learning_rate=1e-6"])
    assert yaml.safe_load(save_resolved(cfg, tmp_path).read_text()) == dataclasses.asdict(cfg)


def test_what_changes_a_stage() -> None:
    def found(*overrides: str, stage: str | None = "profile") -> list[str]:
        return differences(subset(load_config(), stage), subset(load_config(overrides), stage))

    assert found("profile.rollouts_per_turn=16", "seed=3", "algorithm.optimizer.learning_rate=1e-6") == [
        "seed: 0 -> 3",
        "profile.rollouts_per_turn: 8 -> 16",
    ]
    benign = ["tracking.name=x", "generation.max_sequences=2", "run.stages=[turns]", "run_dir=elsewhere"]
    assert found(*benign, stage=None) == []


def test_an_upgrade_adds_keys_at_their_defaults_and_its_version() -> None:
    new = {"pivotrl": "0.2.0", **subset(load_config(["select.action_floor=0"]), "select")}
    old = {key: value for key, value in new.items() if key != "select.action_floor"} | {"pivotrl": "0.1.0"}
    assert differences(old, new) == ["pivotrl: 0.1.0 -> 0.2.0", "select.action_floor: (absent) -> 0.0"]
    assert differences(upgraded(old, new), new) == []
    chosen = {**new, "select.action_floor": 0.5}
    assert differences(upgraded(old, chosen), chosen) == ["select.action_floor: (absent) -> 0.5"]
    gone = {**old, "select.forgotten": 1}  # a key that this version does not know did something once
    assert differences(upgraded(gone, new), new) == ["select.forgotten: 1 -> (absent)"]


@given(st.sampled_from(sorted(strict.schema_keys(Config))), st.data())
def test_a_typo_of_any_key_is_unknown_and_finds_it_or_a_neighbour(key: str, data: st.DataObject) -> None:
    leaf = key.rpartition(".")[2]
    at = data.draw(st.integers(0, len(leaf) - 1))
    typo = key[: len(key) - len(leaf)] + leaf[:at] + leaf[at + 1 :]
    if typo.rstrip(".") != typo or strict.is_known(Config, typo):
        return
    near = strict.nearest(Config, typo)
    assert near is None or strict.is_known(Config, near)
    if len(leaf) > 6:
        assert near is not None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=6,
    )
)
def test_reader_is_total(value: object) -> None:
    problems: list[strict.Problem] = []
    for key in ("seed", "model", "run_dir", "run", "domain", "profile"):
        strict.build(Config, {key: value}, problems)
    strict.build(Config, {"domain": {"verifier": value}, "evaluate": {"policies": value}}, problems)


def test_build_of_defaults_is_the_schema() -> None:
    problems: list[strict.Problem] = []
    assert strict.build(Config, dataclasses.asdict(Config()), problems) == Config()
    assert problems == []


def test_config_dir_prefers_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "pivotrl" / "configuration.py"
    (tmp_path / "pivotrl" / "conf").mkdir(parents=True)
    monkeypatch.setattr(configuration, "__file__", str(module))
    with pytest.raises(UserError, match="conf"):
        config_dir()
    (tmp_path / "pivotrl" / "conf" / "config.yaml").write_text("")
    assert config_dir() == (tmp_path / "pivotrl" / "conf").resolve()


def test_another_verifier_does_not_get_the_options_of_the_domain() -> None:
    own = load_config(["domain=tau2", "domain.verifier.options.text=facts"]).domain.verifier
    assert (own.name, own.options["text"]) == ("tool_calls", "facts")
    assert "strings" in own.options
    other = load_config(["domain=tau2", "domain.verifier.name=strict"]).domain.verifier
    assert (other.name, other.options) == ("strict", {})
    for overrides in (["domain.verifier.options.environment=tau2", "domain.verifier.name=execution"],
                      ["domain.verifier.name=execution", "domain.verifier.options={environment: tau2}"]):  # fmt: skip
        assert load_config(["domain=tau2", *overrides]).domain.verifier.options == {"environment": "tau2"}
    assert load_config(["domain=tau2", "domain.verifier.options=null"]).domain.verifier.options == {}
