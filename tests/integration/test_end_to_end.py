"""The end-to-end baseline: episodes become training sequences, and a reduced study runs it on real engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Algorithm
from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.outfitters import Outfitters
from pivotrl.environments.rollout import EpisodeResult, episodes_of, run_episodes
from pivotrl.errors import UserError
from pivotrl.evaluation.in_domain import EngineActor, SampledAction
from pivotrl.generation.engine import Completion, Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.policy.prefix_tree import build_tree
from pivotrl.rendering.chat import Renderer
from pivotrl.training import end_to_end

ALGORITHM = Algorithm()


def result(task: str, trial: int, success: bool | None, turns: int = 2) -> EpisodeResult:
    outcome = None if success is None else Outcome(success, "ok" if success else "wrong_state")
    done = Completion((7, 8), (-0.1, -0.2), "stop", 0)
    actions = [SampledAction("x", prompt_ids=tuple(range(1, 4 + t)), completion=done) for t in range(turns)]
    return EpisodeResult(Task(task, "f"), trial, outcome, None if outcome else "broke", turns, [], list(actions))


def test_all_turns_of_an_episode_share_its_advantage():
    groups = [[result("a", 0, True, 3), result("a", 1, False, 1)], [result("b", 0, True), result("b", 1, True)]]
    turns = end_to_end.episode_turns(groups, ALGORITHM)
    # Normalised over episodes, not over turns: the long success weighs as much as the short failure in the mean.
    assert [round(t.fixed_advantage, 3) for t in turns] == [1.0, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert all(t.sequence.token_ids[-2:] == (7, 8) and len(t.sequence.targets) == 2 for t in turns)
    metrics = end_to_end.group_metrics(groups)
    assert (metrics["reward"], metrics["group_std"], metrics["mixed_groups"]) == (0.75, 0.25, 0.5)
    assert (metrics["right_groups"], metrics["wrong_groups"]) == (0.5, 0.0)
    assert metrics["episode_turns"] == 2.0


def test_a_broken_episode_takes_no_part():
    groups = [[result("a", 0, True), result("a", 1, None), result("a", 2, False)]]
    assert len(end_to_end.episode_turns(groups, ALGORITHM)) == 4
    assert end_to_end.group_metrics(groups)["unscorable"] == pytest.approx(1 / 3)
    alone = [[result("a", 0, None), result("a", 1, None)]]
    assert end_to_end.episode_turns(alone, ALGORITHM) == []


def test_an_environment_that_is_down_stops_the_run(tmp_path: Path):
    rows = [result("a", 0, None), result("a", 1, None), result("a", 2, True)]
    with pytest.raises(UserError, match="broke 2 of 3 episodes; the first: broke"):
        end_to_end.check_errors(rows, tmp_path)
    end_to_end.check_errors([rows[0], rows[2], rows[2]], tmp_path)
    assert (tmp_path / "errors.jsonl").read_text().count("broke") == 3


def test_sequences_are_what_was_sampled_and_share_their_beginnings(smollm2_tokenizer: Path):
    renderer = Renderer(smollm2_tokenizer, "hermes", "hermes")
    environment = Outfitters()
    tasks = environment.tasks("train", 2)
    texts = [
        "What is your order number?",
        '<tool_call>\n{"name": "get_order", "arguments": {"order": "W1"}}\n</tool_call>',
    ]

    def script(prompt: Sequence[int], k: int, seed: int) -> list[int]:
        return [*renderer.encode(texts[len(prompt) % 2]), renderer.end_of_turn_id]

    engine = ScriptedEngine(script, stop_token_ids=renderer.stop_token_ids)
    actor = EngineActor(engine, renderer, Sampling(max_new_tokens=64), 2048, 0)
    results = run_episodes(environment, episodes_of(tasks, 2), actor, max_turns=3)
    for one in results:
        assert [type(a) for a in one.actions] == [SampledAction] * one.turns
        for before, after in zip(one.actions, one.actions[1:], strict=False):
            seen = (*before.prompt_ids, *before.completion.token_ids)  # type: ignore[attr-defined]
            assert after.prompt_ids[: len(seen)] == seen  # type: ignore[attr-defined]
    flips = [EpisodeResult(r.task, r.trial, Outcome(r.trial == 0, "ok"), None, r.turns, [], r.actions) for r in results]
    turns = end_to_end.episode_turns([flips[:2], flips[2:]], ALGORITHM)
    assert len(turns) == sum(r.turns for r in results)
    tree = build_tree([t.sequence for t in turns])
    longest = sum(len(r.actions[-1].prompt_ids) for r in results[::2])  # type: ignore[attr-defined]
    assert tree.tokens_unique < longest + 2 * 64
    assert tree.tokens_total > 2 * tree.tokens_unique
    assert actor.cost["rollouts"] == len(turns)
    assert actor.validity.turns == len(turns)


# The reduced study, on real engines


@pytest.mark.engine
def test_a_reduced_study(tmp_path: Path, smollm2_tokenizer: Path):
    from experiments.arms import chosen
    from experiments.plan import Study
    from experiments.results import write_results
    from experiments.study import run_study
    from pivotrl import cli
    from pivotrl.configuration import load_config
    from pivotrl.io import read_json, read_jsonl

    model = _tiny(tmp_path / "model", smollm2_tokenizer)

    def start(overrides: Sequence[str]) -> int:
        """`pivotrl run` in this process: nothing is imported twice."""
        cfg = load_config(overrides)
        for stage in cfg.run.stages:
            done = (Path(cfg.run_dir) / stage / "summary.json").exists()
            if not done and (code := cli.main([stage, *overrides])):
                return code
        return 0

    overrides = (
        *("model=tiny_moe", f"model.path={model}", "model.context_length=1536", "precision=fp32"),
        *("trajectories.tasks=12", "trajectories.validation_fraction=0.2", "environment.max_turns=2"),
        *("sampling.max_new_tokens=8", "profile.max_turns=4", "profile.rollouts_per_turn=2", "warmup.steps=0"),
        *("algorithm.steps=2", "algorithm.pivots_per_step=2", "algorithm.group_size=2", "sft.max_kl=1e-9"),
        *("sft.steps=3", "sft.trajectories_per_step=2", "sft.optimizer.learning_rate=1e-3", "evaluate.tasks=2"),
        *("end_to_end.steps=2", "end_to_end.tasks_per_step=2", "end_to_end.group_size=2", "watch.every=1"),
        *("watch.tasks=2", "evaluate.trials=2", "evaluate.drift=2", "evaluate.ood_rows=2"),
        *("evaluate.ood_max_new_tokens=8", f"evaluate.ood_path={_questions(tmp_path)}"),
    )
    study = Study("study_outfitters", tmp_path / "runs", tmp_path / "records", "test", overrides, start)
    run_study(study, chosen(["e2e", "sft"]), [0])
    e2e = study.folder(0, "e2e")
    rows = list(read_jsonl(e2e / "e2e" / "metrics.jsonl"))
    episodes = list(read_jsonl(e2e / "e2e" / "episodes.jsonl"))
    assert [sum(e["turns"] for e in episodes if e["step"] == s) for s in (0, 1)] == [r["rollouts"] for r in rows]
    assert len(episodes) == 8
    curve = list(read_jsonl(e2e / "e2e" / "curve.jsonl"))
    assert [row["step"] for row in curve] == [0, 1, 2]
    assert {row["split"] for row in curve} == {"validation"}
    stopped = read_json(study.folder(0, "sft") / "sft" / "summary.json")
    assert (stopped["steps"], stopped["reached"]) == (1, True)
    assert stopped["kl_to_start"] >= stopped["max_kl"] == 1e-9
    measured = read_json(study.folder(0, "sft") / "evaluate" / "summary.json")["policies"]["sft"]
    assert measured["drift"]["kl_in_domain"]["kl"] > 0
    assert measured["drift"]["kl_unrelated"]["kl"] > 0
    assert set(measured["ood"]["sets"]) == {"choices", "exact"}
    assert set(measured["sampled"]["pass_at"]) == {"1", "2"}
    text = write_results(study.records, tmp_path / "results.md")
    assert all(title in text for title in ("end-to-end RL", "SFT"))


def _tiny(folder: Path, tokenizer: Path) -> Path:
    from transformers import AutoTokenizer

    from tests.tiny_models import save_tiny

    save_tiny("llama", folder, vocab_size=49152, head_dim=32, max_position_embeddings=8192, initializer_range=0.02)
    AutoTokenizer.from_pretrained(str(tokenizer)).save_pretrained(str(folder))
    return folder


def _questions(folder: Path) -> Path:
    import json

    place = folder / "questions"
    place.mkdir()
    choice: dict[str, Any] = {"ctx": "A man", "endings": ["runs.", "sits."], "label": 0}
    for name, row in (("choices", choice), ("exact", {"question": "1 + 1?", "answer": "2"})):
        (place / f"{name}.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    return place
