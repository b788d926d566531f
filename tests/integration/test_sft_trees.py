"""SFT on a tree of several trajectories with one system prompt: what is shared, and that the step stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.prefix_tree_side import side_by_side
from pivotrl.config import Optimizer, Parallel, Precision
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import build_tree, common_prefix
from pivotrl.rendering.chat import Renderer
from pivotrl.training.nonfinite import NonFiniteSteps
from pivotrl.training.sft import Demonstration, demonstrations, sft_step
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from tests.tiny_models import save_tiny

SYSTEM = "You are a clerk. Ask for the order number, look the order up, then answer in one sentence. " * 4
TURNS = 3


def trajectory(name: str) -> Trajectory:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{name} asks question {turn}."})
        messages.append({"role": "assistant", "content": f"Answer {turn} for {name}, as it was agreed."})
    return Trajectory(name, "shop", messages, [], name)


@pytest.fixture(scope="module")
def rows(smollm2_tokenizer: Path) -> list[list[Demonstration]]:
    turns = [t for name in ("Ada", "Bob", "Cleo", "Dan") for t in split_turns(trajectory(name), "train")]
    assert all(isinstance(t, Turn) for t in turns)
    found, beyond = demonstrations(turns, Renderer(smollm2_tokenizer, "hermes"), 1024)  # type: ignore[arg-type]
    assert len(found) == 4 and all(len(row) == TURNS for row in found) and not beyond
    return found


def test_turns_and_system_prompt_are_there_once(rows: list[list[Demonstration]]) -> None:
    """Each trajectory costs its own tokens once, whatever its number of turns, and all together one system prompt."""
    tree = build_tree([d.sequence for row in rows for d in row])
    whole = [row[-1].sequence.token_ids for row in rows]
    one, *others = (torch.tensor(ids).numpy() for ids in whole)
    shared = min(common_prefix(one, other) for other in others)
    assert shared > 60
    assert tree.tokens_unique <= sum(map(len, whole)) - shared * (len(rows) - 1)
    assert tree.tokens_total > 4 * tree.tokens_unique
    assert len(tree.pair_row) == len(set(tree.pair_row)) == sum(len(d.sequence.targets) for row in rows for d in row)


def test_the_step_is_that_of_separate_sequences(
    rows: list[list[Demonstration]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path / "model", vocab_size=49152)
    batch = [d for row in rows for d in row]
    found: list[tuple[dict[str, float], dict[str, Tensor]]] = []
    for build in (build_tree, side_by_side):
        monkeypatch.setattr("pivotrl.policy.policy.build_tree", build)
        settings = Optimizer(1e8, epsilon=1e8, clip_grad=1e9)  # a step that is linear in the gradient
        policy = MegatronPolicy.load(
            tmp_path / "model", Parallel(), Precision(policy="fp32"), settings, 1024, 4, seed=0
        )
        stats = sft_step(policy, batch, 0, Precision(policy="fp32"), NonFiniteSteps(tmp_path, 1))
        found.append((stats, {n: t.clone() for n, t in policy.hf_weights()}))
    (tree, after), (flat, separate) = found
    assert flat["tokens_unique"] == tree["tokens_total"] > 4 * tree["tokens_unique"]
    for key in ("loss", "grad_norm", "target_tokens"):
        assert tree[key] == pytest.approx(flat[key], rel=1e-4), key
    for name, weight in separate.items():
        torch.testing.assert_close(after[name], weight, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
