"""Chat template -> the exact token ids of a state, as a serving engine sees them; and the ids of an SFT target.

States are rendered turn by turn, never by slicing one rendering of the whole dialogue: templates drop the thinking of
earlier turns, so the two differ (field report E2).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.rendering.parsing import format_action, get_action_format, parse_action
from pivotrl.trajectories.schema import Action, JsonDict
from pivotrl.trajectories.thinking import CLOSE, OPEN

CACHED_PROMPTS = 512  # rendered states whose ids are kept: the G or K samples of a turn ask for them again
PROBE_NAME = "probe_tool_7f3"
PROBE_TOOL: JsonDict = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}


def named_template(name: str) -> str:
    """Text of a declared template ("hermes"). Raises `UserError` for an unknown name."""
    folder = resources.files("pivotrl.rendering") / "templates"
    known = sorted(item.name.removesuffix(".jinja") for item in folder.iterdir() if item.name.endswith(".jinja"))
    if name not in known:
        raise UserError(
            f"model.chat_template={name!r} is unknown. Use null (the model's own) or one of {', '.join(known)}."
        )
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


class Renderer:
    """Messages <-> token ids for one model folder.

    `chat_template`: None for the model's own, or a declared template's name. Raises `UserError` for a folder without a
    tokenizer or template, and, at the first state with tools, for a template that cannot show them.
    """

    def __init__(self, model_dir: Path, chat_template: str | None = None, action_format: str = "hermes") -> None:
        self.model_dir = Path(model_dir)
        self.chat_template = chat_template
        self.action_format = get_action_format(action_format).name
        self.tokenizer = _load_tokenizer(self.model_dir)
        if chat_template is None and not self.tokenizer.chat_template:
            raise UserError(
                f"{self.model_dir}: the tokenizer has no chat template. Set model.chat_template=hermes (ChatML models)."
            )
        # None: the tokenizer picks among its own, as an engine does (some have another one for states with tools).
        self.template = None if chat_template is None else named_template(chat_template)
        self._encode = lru_cache(maxsize=CACHED_PROMPTS)(self._encode_uncached)
        probe = [{"role": "user", "content": "x"}]
        self._generation_prompt = self._suffix(self._render(probe, [], True), self._render(probe, [], False))
        self.thinking_open = self._generation_prompt.rstrip().endswith("<think>")
        self._shows_tools = PROBE_NAME in self._render(probe, [PROBE_TOOL], True)
        self.end_of_turn_id = self._end_of_turn()
        self.stop_token_ids: tuple[int, ...] = self._stop_ids()

    def prompt_ids(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict]) -> list[int]:
        """Ids of a state, generation prompt included. `messages` and `tools` in the shapes of `trajectories.schema`."""
        return list(self._encode(self.prompt_text(messages, tools)))

    def prompt_text(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict]) -> str:
        """The text whose ids `prompt_ids` gives."""
        uses_tools = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if uses_tools and not self._shows_tools:
            raise UserError(
                f"{self.model_dir}: the model's chat template does not show tools. Set model.chat_template=hermes."
            )
        return self._render([template_message(message) for message in messages], list(tools), True)

    def completion_ids(self, action: Action) -> list[int]:
        """Ids of a demonstrated action in its state (SFT target): its text, encoded on its own after the generation
        prompt, ended by the end-of-turn id."""
        text = format_action(action, self.action_format)
        if self.thinking_open:  # the prompt has already opened the block
            text = text.removeprefix(f"{OPEN}\n") if action.thinking else f"\n{CLOSE}\n\n{text}"
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end_of_turn_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion: special tokens stay (some mark calls and thinking), the last stop id goes."""
        kept = list(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def whole_text(self, ids: Sequence[int]) -> str:
        """Text of a completion, with the tag of the thinking that the prompt opened."""
        return f"{OPEN}\n{self.decode(ids)}" if self.thinking_open else self.decode(ids)

    def parse(self, ids: Sequence[int], tools: Sequence[JsonDict] = ()) -> Action:
        """The action of a completion's ids; thinking that the prompt opened counts as thinking. Total.

        `tools`: those of the state, whose schemas type the values of formats that write them as bare text.
        """
        return parse_action(self.whole_text(ids), self.action_format, tools)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special token added."""
        return list(self._encode(text))

    def fingerprint(self) -> str:
        """Hash of what turns messages into ids: template, tokenizer, action format (design idea 5)."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = json.dumps(self.template or self.tokenizer.chat_template, sort_keys=True)
        parts = (template, vocabulary, self.action_format, repr(self.stop_token_ids))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _render(self, messages: list[JsonDict], tools: list[JsonDict], generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except TemplateError as error:
            raise UserError(f"{self.model_dir}: the chat template refuses these messages: {error}") from error
        return text

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        # The template writes every special token itself: letting the tokenizer add its own would double the BOS (E5).
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @staticmethod
    def _suffix(longer: str, shorter: str) -> str:
        return longer[len(shorter) :] if longer.startswith(shorter) else ""

    def _end_of_turn(self) -> int:
        """The special token that the template writes after an assistant turn; the EOS where it writes none."""
        mark = "probe answer 7f3"
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        tail = self._render(messages, [], False).rpartition(mark)[2]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in self.tokenizer.encode(tail, add_special_tokens=False):
            if token in special:
                return int(token)
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"{self.model_dir}: no token ends an assistant turn (neither in the template nor an EOS).")
        return int(self.tokenizer.eos_token_id)

    def _stop_ids(self) -> tuple[int, ...]:
        ids = {self.end_of_turn_id}
        if self.tokenizer.eos_token_id is not None:
            ids.add(int(self.tokenizer.eos_token_id))
        file = self.model_dir / "generation_config.json"
        if file.is_file():
            declared: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
        return tuple(sorted(ids))


def template_message(message: JsonDict) -> JsonDict:
    """A schema message as templates expect it: arguments stay objects (a string would be encoded twice, E3)."""
    if message["role"] != "assistant":
        return {key: value for key, value in message.items() if key != "is_error"}
    result: JsonDict = {"role": "assistant", "content": message.get("content", "")}
    if "thinking" in message:
        result["reasoning_content"] = result["reasoning"] = message["thinking"]  # engines give templates both names
    if "tool_calls" in message:
        result["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in message["tool_calls"]
        ]
    return result


def _load_tokenizer(model_dir: Path) -> Any:
    if not model_dir.is_dir():
        raise UserError(f"model folder {model_dir} does not exist.")
    if not any(
        (model_dir / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise UserError(
            f"{model_dir}: no tokenizer in the folder (tokenizer.json). Copy the model's tokenizer files there."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{model_dir}: the tokenizer cannot be loaded: {error}") from error
