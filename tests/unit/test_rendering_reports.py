"""Field reports E1, E2, E5 and E7, on a byte-level tokenizer that knows "he", "llo", "hello" and adds a BOS itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_profile import Equal

from pivotrl.config import Config, Trajectories
from pivotrl.generation.engine import Completion
from pivotrl.local_rollouts import State, score
from pivotrl.rendering.chat import Renderer
from pivotrl.rendering.compare import first_difference
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.trajectories.turn_lines import turns_in
from pivotrl.turns_stage import run_turns

TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' and loop.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    start = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[start])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("toy")
    tokenizer.save_pretrained(str(folder))
    return Renderer(folder)


def test_sampled_ids_are_kept_though_their_text_encodes_otherwise(renderer: Renderer) -> None:
    ids = tuple(renderer.tokenizer.convert_tokens_to_ids(["he", "llo"]))
    state = [{"role": "user", "content": "hello"}]
    turn = Turn("t#0", "t", "t", 0, "d", "train", state, [], Action("hello"), "f:1")
    completion = Completion((*ids, renderer.end_of_turn_id), (0.0, 0.0, 0.0), "stop", 0)
    prompt = tuple(renderer.prompt_ids(state, []))
    ((rollout,),) = score([State(turn, prompt)], [[completion]], renderer, Equal())  # type: ignore[arg-type]
    assert rollout.completion.token_ids[:2] == ids and rollout.action == Action("hello")
    again = renderer.encode(renderer.decode(ids))
    assert again == renderer.tokenizer.convert_tokens_to_ids(["hello"])
    found = first_difference(ids, again, renderer.tokenizer)
    assert found is not None and (found.index, found.ours, found.theirs) == (0, ids[0], again[0])


def test_there_is_one_bos(renderer: Renderer) -> None:
    state = [{"role": "user", "content": "hello"}]
    ids, bos = renderer.prompt_ids(state, []), renderer.tokenizer.bos_token_id
    assert ids.count(bos) == 1 and ids[0] == bos
    assert renderer.tokenizer.encode(renderer.prompt_text(state, [])).count(bos) == 2  # the fault, were ours naive
    assert bos not in renderer.completion_ids(Action("hello"))


def test_a_prompt_is_no_slice_of_the_whole_dialogue(renderer: Renderer) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "secret"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "now"},
    ]
    first, second = renderer.prompt_text(said[:1], []), renderer.prompt_text(said[:3], [])
    assert second == "<s>[user]a</s>[assistant]b</s>[user]c</s>[assistant]"
    target = renderer.decode(renderer.completion_ids(Action("b", "secret")))
    assert "secret" in target and not second.startswith(first + target)  # what was sampled is not what is seen later
    found = first_difference(renderer.encode(first + target), renderer.prompt_ids(said[:3], []), renderer.tokenizer)
    assert found is not None and found.theirs_text.startswith("b") and found.index == len(renderer.encode(first))


def test_non_ascii_stays_from_data_to_prompt_and_file(renderer: Renderer, tmp_path: Path) -> None:
    text: Any = "café/日本 🚀"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}))  # escaped as \\u...
    run_turns(Config(trajectories=Trajectories(path=str(tmp_path / "x.jsonl"))), tmp_path)
    for name in ("turns", "messages"):
        assert text in (tmp_path / f"turns/{name}.jsonl").read_text(encoding="utf-8")
    (turn,) = turns_in(tmp_path / "turns/turns.jsonl")
    ids = renderer.prompt_ids(turn.messages, turn.tools)
    assert text in renderer.decode(ids) and renderer.parse(renderer.completion_ids(turn.demonstration)).text == text
