"""Parts that every reader shares: source messages and tools -> the message shape of `schema`.

Nothing is mended: what cannot be taken as it stands raises `RowError`, and the reader skips that row with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pivotrl.trajectories import strict_json
from pivotrl.trajectories.schema import Action, Defect, JsonDict, ToolCall


class RowError(Exception):
    """A row that cannot be read: `reason` is a machine name, `detail` says where and what."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Unreadable(dict[str, Any]):
    """A message that a format could not read, in its place among the others: its `role` alone, and why."""

    def __init__(self, role: Any, error: RowError) -> None:
        super().__init__(role=role)
        self.error = error


TEXT_PARTS = ("text", "input_text", "output_text")
THINKING_KEYS = ("thinking", "reasoning_content", "reasoning")


def text_of(content: Any, where: str) -> str:
    """Message content as one string: a string, null, or a list of text parts (joined without separator)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, where) for part in content)
    raise RowError("unsupported_content", f"{where}: content is a {type(content).__name__}, not text")


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowError("unsupported_content", f"{where}: content part of type {str(kind)[:40]!r} is not text")


def arguments_of(value: Any, where: str) -> JsonDict:
    """Arguments as an object; a JSON string of an object is decoded once (field report E3)."""
    if isinstance(value, str):
        try:
            value = strict_json.loads(value)
        except strict_json.StrictJsonError as error:
            raise RowError("arguments_not_json", f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise RowError("arguments_not_an_object", f"{where}: arguments are {type(value).__name__}")
    return value


def split_thinking(content: str) -> tuple[str, str]:
    """(thinking, text) of content that begins with a closed `<think>` block; an unclosed one stays in the text."""
    stripped = content.lstrip()
    if not stripped.startswith("<think>"):
        return "", content
    inner, closed, text = stripped[len("<think>") :].partition("</think>")
    if not closed:
        return "", content
    return inner.removeprefix("\n").removesuffix("\n"), text.removeprefix("\n").removeprefix("\n")


def _calls(message: JsonDict, where: str) -> list[JsonDict]:
    raw = message.get("tool_calls")
    if raw is None:
        raw = []
    if not isinstance(raw, list):
        raise RowError("bad_tool_calls", f"{where}: tool_calls is a {type(raw).__name__}, not a list")
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(raw)]
    if message.get("function_call") is not None:  # before parallel calls there was one, without an id
        if calls:
            raise RowError("bad_tool_calls", f"{where}: both tool_calls and function_call")
        calls = [_call({"function": message["function_call"]}, f"{where}.function_call")]
    return calls


def _call(call: Any, where: str) -> JsonDict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RowError("bad_tool_calls", f"{where}: not a call object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError("call_without_name", where)
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise RowError("bad_tool_calls", f"{where}: id is a {type(identity).__name__}")
    return {"id": identity or "", "name": name, "arguments": arguments_of(function.get("arguments"), where)}


def assistant_message(message: JsonDict, where: str) -> JsonDict:
    """An OpenAI assistant message in the schema's shape (absent parts left out; missing call ids are "")."""
    text = text_of(message.get("content"), where)
    thinking = ""
    for key in THINKING_KEYS:
        if message.get(key) is not None:
            thinking = text_of(message[key], f"{where}.{key}")
            break
    if not thinking:
        thinking, text = split_thinking(text)
    result: JsonDict = {"role": "assistant"}
    if text:
        result["content"] = text
    if thinking:
        result["thinking"] = thinking
    if calls := _calls(message, where):
        result["tool_calls"] = calls
    return result


class _Pending:
    """Calls that wait for a result, so that results find their call by id, or in order where there are no ids.

    Ids may come again in later turns (some models count from 0 in each), but not within one message.
    """

    def __init__(self) -> None:
        self.open: list[JsonDict] = []
        self.made_up: set[str] = set()
        self.count = 0

    def add(self, calls: Sequence[JsonDict], where: str) -> None:
        given = {call["id"] for call in calls if call["id"]}
        if len(given) < sum(1 for call in calls if call["id"]):
            raise RowError("duplicate_call_id", f"{where}: two calls of one message share an id")
        for call in calls:
            if not call["id"]:
                call["id"] = f"call_{self.count}"
                while call["id"] in given:
                    call["id"] += "_"
                self.made_up.add(call["id"])
            self.count += 1
        self.open.extend(calls)

    def take(self, identity: Any, name: Any, where: str) -> JsonDict:
        by_id = [call for call in reversed(self.open) if call["id"] == identity]
        in_order = [
            call
            for call in self.open
            if (identity is None or call["id"] in self.made_up) and (not name or name == call["name"])
        ]
        for call in (*by_id, *in_order):
            self.open = [other for other in self.open if other is not call]
            return call
        hint = "a result follows the assistant message that calls it"
        raise RowError("orphan_tool_result", f"{where}: no open call with id {str(identity)[:80]!r}; {hint}")


def messages_of(raw: Any) -> list[JsonDict]:
    """OpenAI chat messages -> schema messages. Raises `RowError` (unknown role, orphan result, bad arguments...)."""
    result, error = _readable(raw)
    if error is not None:
        raise error
    _require_turn(result)
    return result


def read_messages(raw: Any) -> tuple[list[JsonDict], Defect | None]:
    """OpenAI chat messages -> schema messages up to the first that cannot be read, and that defect.

    Raises `RowError` where no assistant turn stands before it. An assistant turn goes with its broken pieces, and with
    a result that none of its calls asked for: such a turn has lost a call.
    """
    result, error = _readable(raw)
    if error is None:
        _require_turn(result)
        return result, None
    kept = result[: _cut(raw, result, error.reason)]
    if not any(message["role"] == "assistant" for message in kept):
        raise error
    return kept, Defect(error.reason, error.detail, _turns(raw[len(kept) :]))


def _readable(raw: Any) -> tuple[list[JsonDict], RowError | None]:
    """One schema message for each of the raw ones before the first that cannot be read, and why that one cannot."""
    if not isinstance(raw, list):
        raise RowError("bad_messages", f"messages is a {type(raw).__name__}, not a list")
    result: list[JsonDict] = []
    pending = _Pending()
    try:
        for i, message in enumerate(raw):
            result.append(_message(message, f"messages[{i}]", pending))
    except RowError as error:
        return result, error
    return result, None


def _message(message: Any, where: str, pending: _Pending) -> JsonDict:
    if isinstance(message, Unreadable):
        raise message.error
    role = message.get("role") if isinstance(message, dict) else None
    if role in ("system", "developer", "user"):
        role = "user" if role == "user" else "system"
        return {"role": role, "content": text_of(message.get("content"), where)}
    if role == "assistant":
        said = assistant_message(message, where)
        pending.add(said.get("tool_calls", ()), where)
        return said
    if role in ("tool", "function"):
        call = pending.take(message.get("tool_call_id"), message.get("name"), where)
        content = text_of(message.get("content"), where)
        result = {"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": content}
        if message.get("is_error") is True:
            result["is_error"] = True
        return result
    raise RowError("unknown_role", f"{where}: {str(role)[:80]!r}")


def _require_turn(messages: list[JsonDict]) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no_assistant_turn", f"{len(messages)} messages, none by the assistant")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _cut(raw: list[Any], result: list[JsonDict], reason: str) -> int:
    """How many messages stand before the turn that the message `raw[len(result)]` breaks."""
    cut = len(result)
    if reason == "orphan_tool_result":
        while cut and result[cut - 1]["role"] == "tool":
            cut -= 1
        if not cut or result[cut - 1]["role"] != "assistant":
            return len(result)  # no turn is near that could have lost its call
        cut -= 1
    elif _role(raw[cut]) != "assistant":
        return cut
    while cut and result[cut - 1]["role"] == "assistant" and "tool_calls" not in result[cut - 1]:
        cut -= 1  # earlier pieces of the same turn
    return cut


def _turns(raw: list[Any]) -> int:
    """Assistant turns among raw messages, where pieces of one model call count once (see `turns.merge_pieces`)."""
    count, joined = 0, False
    for message in raw:
        is_turn = _role(message) == "assistant"
        count += is_turn and not joined
        joined = is_turn and not (message.get("tool_calls") or message.get("function_call"))
    return count


def tools_of(raw: Any) -> list[JsonDict]:
    """Tools in any of the usual shapes (a list or its JSON string) -> OpenAI function tools."""
    if isinstance(raw, str):
        try:
            raw = strict_json.loads(raw) if raw.strip() else []
        except strict_json.StrictJsonError as error:
            raise RowError("bad_tools", f"tools string: {error}") from error
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise RowError("bad_tools", f"tools is a {type(raw).__name__}, not a list")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw)]


def _tool(tool: Any, where: str) -> JsonDict:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise RowError("bad_tools", f"{where}: not a function tool")
    function = tool.get("function")
    if not isinstance(function, dict):
        function = {key: value for key, value in tool.items() if key != "type"}
    name = function.get("name") or function.get("name_for_model")
    if not isinstance(name, str) or not name:
        raise RowError("bad_tools", f"{where}: a tool without a name")
    description = function.get("description") or function.get("description_for_model") or ""
    parameters = function.get("parameters")
    if parameters is None:
        parameters = function.get("input_schema")  # Anthropic
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RowError("bad_tools", f"{where}: parameters of {name[:80]} are not a JSON Schema object")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def action_of(message: JsonDict) -> Action:
    """The action that a schema assistant message records."""
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in message.get("tool_calls", ()))
    return Action(message.get("content", ""), message.get("thinking", ""), calls)
