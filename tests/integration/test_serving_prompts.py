"""Prefix property: a state's ids are those of vLLM's own chat endpoint for the same messages and tools.

vLLM's side is its request model, its message parsing and its template call, in the order of its chat endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pivotrl.rendering.chat import Renderer, named_template
from pivotrl.rendering.compare import first_difference
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns

# In the manner of Qwen3: thinking stays only after the last user message, and the prompt closes or opens nothing.
DROPS_THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor -%}
{%- set marks = namespace(seen=0) -%}
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set marks.seen = marks.seen + 1 %}{% endif -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'assistant' and m.reasoning_content and marks.seen > ns.last -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

ENCODED = 8  # one of so many texts is encoded too: equal texts have equal ids
NO_TURNS = ("ood", "LICENSES")


def states(shared: Path) -> Iterator[Turn]:
    """All states of all shared files; where there is thinking, once more as they are after the user has spoken."""
    files = [p for p in sorted(shared.rglob("*.*")) if p.suffix in (".jsonl", ".json", ".traj")]
    for file in files:
        if file.parent.name in NO_TURNS or file.name == "EXPECTED.json":
            continue
        items = [i for i in read_trajectories(str(file)) if isinstance(i, Trajectory)]
        turns = [t for i in items for t in split_turns(i, "train") if isinstance(t, Turn)]
        for turn in turns:
            yield turn
            if any("thinking" in message for message in turn.messages):
                yield replace(turn, messages=[*turn.messages, {"role": "user", "content": "Go on."}])


def request_messages(turn: Turn) -> list[dict[str, Any]]:
    """The state as a client sends it: arguments as JSON strings, thinking as `reasoning`."""
    result = []
    for message in turn.messages:
        if message["role"] != "assistant":
            result.append({key: value for key, value in message.items() if key != "is_error"})
            continue
        row: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        if "thinking" in message:
            row["reasoning"] = message["thinking"]
        if "tool_calls" in message:
            row["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        result.append(row)
    return result


def served_text(turn: Turn, tokenizer: Any, template: str | None) -> str:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    tools = {"tools": turn.tools} if turn.tools else {}
    request = ChatCompletionRequest(model="m", messages=request_messages(turn), **tools)
    config: Any = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, trust_remote_code=False, revision=None, code_revision=None
    )
    dumped = [tool.model_dump() for tool in request.tools] if request.tools else None
    content = resolve_chat_template_content_format(template, dumped, "auto", tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format=content)
    assert not request.add_special_tokens
    text: str = safe_apply_chat_template(
        config,
        tokenizer,
        conversation,
        tools=dumped,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=request.add_generation_prompt,
    )
    return text


@pytest.mark.parametrize("template", ["hermes", "drops_thinking"])
def test_states_are_what_the_chat_endpoint_renders(
    smollm2_tokenizer: Path, shared_data: Path, tmp_path: Path, template: str
) -> None:
    pytest.importorskip("vllm")
    folder, name = smollm2_tokenizer, "hermes"
    if template == "drops_thinking":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(smollm2_tokenizer))
        tokenizer.chat_template = DROPS_THINKING
        tokenizer.save_pretrained(str(tmp_path))
        folder, name = tmp_path, None  # type: ignore[assignment]
    renderer = Renderer(folder, name)
    text = named_template("hermes") if name else DROPS_THINKING
    count = dropped = kept = 0
    for turn in states(shared_data):
        ours, theirs = renderer.prompt_text(turn.messages, turn.tools), served_text(turn, renderer.tokenizer, text)
        count += 1
        if ours != theirs or count % ENCODED == 0:
            ids = renderer.tokenizer.encode(theirs, add_special_tokens=False)
            difference = first_difference(renderer.prompt_ids(turn.messages, turn.tools), ids, renderer.tokenizer)
            assert difference is None and ours == theirs, f"{turn.id}: {difference}"
        thinking = [m["thinking"] for m in turn.messages if "thinking" in m]
        if thinking:
            shown = thinking[0] in ours
            kept, dropped = kept + shown, dropped + (not shown)
    assert count > 1600 and dropped > 20 and (kept > 20 if template == "drops_thinking" else kept == 0)


def test_the_checker_names_the_first_token_that_differs(smollm2_tokenizer: Path) -> None:
    renderer = Renderer(smollm2_tokenizer, "hermes")
    ours, theirs = renderer.encode("one two three"), renderer.encode("one two four")
    found = first_difference(ours, theirs, renderer.tokenizer)
    assert found is not None and found.index == 2 and found.before == "one two"
    assert (found.ours_text, found.theirs_text) == (" three", " four") and "token 2" in str(found)
    shorter = first_difference(ours, ours[:2], renderer.tokenizer)
    assert shorter is not None and (shorter.index, shorter.theirs, shorter.theirs_text) == (2, None, "")
    assert first_difference(ours, list(ours), renderer.tokenizer) is None
