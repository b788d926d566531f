"""Shell tasks fit a small model's context: rendered exactly as the engine sees them, with SmolLM2's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pivotrl.environments.registry import get_environment
from pivotrl.environments.shell_tasks.tasks import FAMILIES
from pivotrl.rendering.chat import Renderer
from pivotrl.trajectories.schema import Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers import sandbox


@pytest.mark.skipif(sandbox.unusable() is not None, reason=str(sandbox.unusable()))
def test_states_are_short(smollm2_tokenizer: Path) -> None:
    renderer = Renderer(smollm2_tokenizer, "hermes", "hermes")
    environment = get_environment("shell_tasks")
    first, last, actions = [], [], []
    for task in environment.tasks("train", 2 * len(FAMILIES)):
        trajectory = environment.expert(task)
        turns = [t for t in split_turns(trajectory, "train") if isinstance(t, Turn)]
        lengths = [len(renderer.prompt_ids(t.messages, t.tools)) for t in turns]
        first.append(lengths[0])
        last.append(lengths[-1])
        actions += [len(renderer.completion_ids(t.demonstration)) for t in turns]
    print(f"first {min(first)}-{max(first)}, last {min(last)}-{max(last)}, action up to {max(actions)}")
    assert max(first) <= 250
    assert max(last) <= 500
    assert max(actions) <= 64  # sampling.max_new_tokens of experiment=study_shell
