"""Rendering with a real tokenizer: prompts extend each other, targets are what the next prompt holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pivotrl.errors import UserError
from pivotrl.rendering import prompts
from pivotrl.rendering.chat import Renderer, named_template
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.trajectories.turns import split_turns

TOOL = {"type": "function", "function": {"name": "f", "description": "it's <b>", "parameters": {"type": "object"}}}
STATE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "café 日本"},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"id": "1", "name": "f", "arguments": {"x": "日本", "y": [1, 2.0]}}],
    },
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "R1"},
    {"role": "tool", "tool_call_id": "2", "name": "f", "content": "R2"},
]
RENDERED = """<|im_start|>system
S

Tools:
<tools>
{"name": "f", "description": "it's <b>", "parameters": {"type": "object"}}
</tools>
To call one, write:
<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call><|im_end|>
<|im_start|>user
café 日本<|im_end|>
<|im_start|>assistant
ok
<tool_call>
{"name": "f", "arguments": {"x": "日本", "y": [1, 2.0]}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
R1
</tool_response>
<tool_response>
R2
</tool_response><|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def renderer(smollm2_tokenizer: Path) -> Renderer:
    return Renderer(smollm2_tokenizer, "hermes")


def test_hermes_template_to_the_letter(renderer: Renderer) -> None:
    assert renderer.prompt_text(STATE, [TOOL]) == RENDERED
    ids = renderer.prompt_ids(STATE, [TOOL])
    assert renderer.tokenizer.decode(ids) == RENDERED
    assert ids.count(renderer.tokenizer.bos_token_id) == RENDERED.count(
        "<|im_start|>"
    )  # none is added to the template's


def test_completion_is_the_action_and_the_stop_id(renderer: Renderer) -> None:
    action = Action("Let me see.", "", (ToolCall("f", {"x": "日本"}), ToolCall("f", {})))
    ids = renderer.completion_ids(action)
    assert ids[-1] == renderer.end_of_turn_id and ids.count(ids[-1]) == 1
    assert renderer.stop_token_ids == (renderer.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert renderer.parse(ids) == renderer.parse(ids[:-1]) == action
    assert "日本" in renderer.decode(ids)


def test_prompts_extend_each_other_token_by_token(renderer: Renderer, shared_data: Path) -> None:
    """prompt(t+1) begins with prompt(t) + action(t), in ids, on real dialogues without thinking.

    The one exception is a fact of the tokenizer: an action that begins with a newline merges with the newline of the
    generation prompt. Such an action cannot be sampled either, because a sampled first newline stays its own token.
    """
    pairs = broken = 0
    for name in (
        "tau_bench/airline_sft_compact.jsonl",
        "conversational/gym_workplace_chat.jsonl",
        "tau2/gym_rollouts_chat.jsonl",
    ):
        for item in read_trajectories(str(shared_data / name)):
            assert not isinstance(item, Skip)
            before: list[int] | None = None
            newline = False
            for turn in split_turns(item, "train"):
                if isinstance(turn, Skip):
                    continue
                prompt = renderer.prompt_ids(turn.messages, turn.tools)
                if before is not None:
                    pairs += 1
                    broken += newline
                    assert (prompt[: len(before)] == before) is not newline, turn.id
                before = prompt + renderer.completion_ids(turn.demonstration)
                newline = turn.demonstration.text.startswith("\n")
    assert pairs > 300 and broken == 2


def test_argument_shapes_give_one_prompt(renderer: Renderer, tmp_path: Path) -> None:
    texts = []
    for arguments in ({"a": "é"}, '{"a":"\\u00e9"}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
        file = tmp_path / "x.jsonl"
        file.write_text(json.dumps({"messages": [*messages, {"role": "tool", "tool_call_id": "1", "content": "r"}]}))
        (item,) = read_trajectories(str(file))
        assert not isinstance(item, Skip)
        texts.append(renderer.prompt_text(item.messages, [TOOL]))
    assert texts[0] == texts[1] and '{"a": "é"}' in texts[0]


def test_processes_render_what_one_renders(
    renderer: Renderer, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "PARALLEL_FROM", 40)
    states = []
    for item in read_trajectories(str(shared_data / "tau_bench/airline_sft_compact.jsonl")):
        assert not isinstance(item, Skip)
        states += [(t.messages, t.tools) for t in split_turns(item, "train") if not isinstance(t, Skip)]
    states = states[:48]
    alone = [tuple(renderer.prompt_ids(*state)) for state in states]
    assert list(prompts.prompts_of(states, renderer, workers=2, cache=tmp_path)) == alone
    monkeypatch.setattr(Renderer, "prompt_ids", None)
    assert list(prompts.prompts_of(states, renderer, workers=2, cache=tmp_path)) == alone


def test_a_recorded_failure_does_not_show(renderer: Renderer) -> None:
    failed = [{**m, "is_error": True} if m["role"] == "tool" else m for m in STATE]
    assert failed != STATE and renderer.prompt_text(failed, [TOOL]) == RENDERED


def test_errors_say_what_to_do(smollm2_tokenizer: Path, tmp_path: Path) -> None:
    own = Renderer(smollm2_tokenizer)
    assert own.prompt_ids([{"role": "user", "content": "hi"}], [])
    with pytest.raises(UserError, match="chat_template=hermes"):
        own.prompt_ids([{"role": "user", "content": "hi"}], [TOOL])
    with pytest.raises(UserError, match="no tokenizer"):
        Renderer(tmp_path)
    with pytest.raises(UserError, match="unknown"):
        Renderer(smollm2_tokenizer, "hermess")


def test_fingerprint_follows_template(smollm2_tokenizer: Path, renderer: Renderer) -> None:
    assert renderer.fingerprint() == Renderer(smollm2_tokenizer, "hermes").fingerprint()
    assert renderer.fingerprint() != Renderer(smollm2_tokenizer).fingerprint()


THINKING = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif -%}"""


def test_a_template_that_opens_thinking(smollm2_tokenizer: Path, tmp_path: Path) -> None:
    """E2: history thinking is dropped from prompts, and the block that the prompt opens is closed by the completion."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_tokenizer))
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(str(tmp_path))
    renderer = Renderer(tmp_path)
    assert renderer.thinking_open
    for action in (Action("hi", "because"), Action("hi")):
        ids = renderer.completion_ids(action)
        assert not renderer.decode(ids).startswith("<think>") and renderer.parse(ids) == action
    said = {"role": "assistant", "content": "hi", "thinking": "secret"}
    prompt = renderer.prompt_text([{"role": "user", "content": "u"}, said, {"role": "user", "content": "v"}], [])
    assert "secret" not in prompt and prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert renderer.parse(renderer.tokenizer.encode("cut off")).problems == ("unclosed_thinking",)


def test_a_benchmark_is_served_with_the_template_of_the_run_and_with_thinking_apart(
    smollm2_tokenizer: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from pivotrl.configuration import load_config
    from pivotrl.evaluation.benchmark import server_words

    def words(folder: Path, template: str) -> list[str]:
        cfg = load_config(["model=tiny_moe", f"model.path={folder}", f"model.chat_template={template}"])
        return server_words(cfg, folder, 8000, tmp_path / "out")

    named = words(smollm2_tokenizer, "hermes")
    assert Path(named[named.index("--chat-template") + 1]).read_text() == named_template("hermes")
    assert "--reasoning-parser" not in named
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_tokenizer))
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(str(tmp_path / "thinks"))
    own = words(tmp_path / "thinks", "null")
    assert own[own.index("--reasoning-parser") + 1] == "deepseek_r1"
    assert "--chat-template" not in own


def test_the_rendering_benchmark_compares_every_way(
    smollm2_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import rendering

    monkeypatch.setattr(prompts, "PARALLEL_FROM", 40)
    monkeypatch.setattr(rendering, "resolve_model", lambda path: smollm2_tokenizer)
    words = ["rendering", "--json", "--trajectories", "9", "--turns", "5", "--workers", "2", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", words)
    rendering.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["states"] == 45 and row["tokens"] > 45 * 500
    assert list(row["seconds"]) == ["one process", "2 processes", "one process, empty cache", "full cache"]
    monkeypatch.setattr(rendering, "prompts_of", lambda states, renderer, workers=1, cache=None: [(workers,)])
    with pytest.raises(AssertionError, match="2 processes gives other ids"):
        rendering.main()
