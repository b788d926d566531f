"""`pivotrl show` and `pivotrl export-gym`: turns of a run, for a person and for NeMo-Gym."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.trajectories.gym_rows import gym_row, unlisted_tools
from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.trajectories.turn_lines import turns_in, with_states

TAIL_TOKENS = 32  # of the prompt, shown one by one
SHOWN_CHARACTERS = 2000  # of one message


def export_gym(run_dir: Path, output: Path, agent: str | None = None) -> dict[str, Any]:
    """select/pivots.jsonl of a run -> pivot rows with pass rates. Returns counts of rows written and left out.

    Raises `UserError` when there is no selection, or when a pivot's turn is not in turns/turns.jsonl.
    """
    selected = run_dir / "select" / "pivots.jsonl"
    if not selected.is_file():
        raise UserError(f"{selected} does not exist: run `pivotrl select run_dir={run_dir}` first")
    rewards = {row["turn_id"]: row["rewards"] for row in read_jsonl(selected)}
    left_out: Counter[str] = Counter()
    found: set[str] = set()

    def rows() -> Iterator[JsonDict]:
        for turn in turns_in(_turns_file(run_dir), ids=rewards):
            found.add(turn.id)
            if unlisted_tools(turn):
                left_out["tool_not_listed"] += 1
                continue
            yield gym_row(turn, rewards[turn.id], agent)

    written = write_jsonl(output, rows())
    if missing := sorted(rewards.keys() - found):
        output.unlink()
        raise UserError(f"{selected}: turn {missing[0]!r} is not in {_turns_file(run_dir)}; the files are of two runs.")
    return {"rows": written, "left_out": dict(left_out)}


def _turns_file(run_dir: Path) -> Path:
    path = run_dir / "turns" / "turns.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: run `pivotrl turns run_dir={run_dir} trajectories.path=FILE` first")
    return path


def find_turn(run_dir: Path, turn_id: str) -> Turn:
    """The turn of a run. Raises `UserError` that says why it was skipped, or which ids are near."""
    start = f'{{"id": {json.dumps(turn_id, ensure_ascii=False)},'.encode()
    near: list[str] = []
    path = _turns_file(run_dir)
    with path.open("rb") as file:
        for line in file:
            if line.startswith(start):
                return Turn.from_json(next(with_states(path, [json.loads(line)])))
            if len(near) < 5 and turn_id.partition("#")[0].encode() in line[:400]:
                near.append(json.loads(line)["id"])
    for row in read_jsonl(run_dir / "turns" / "skipped.jsonl"):
        if row["id"] == turn_id:
            raise UserError(f"{turn_id} was skipped: {row['reason']} ({row['detail']}); {row['source']}:{row['line']}")
    hint = f" Near: {', '.join(near)}." if near else " Ids are <trajectory id>#<depth>, as in turns/turns.jsonl."
    raise UserError(f"{run_dir} has no turn {turn_id!r}.{hint}")


def show_turn(cfg: Config, turn_id: str, with_model: bool) -> str:
    """A turn as text: flags, profile, state, demonstrated action; with a model, the last tokens of the prompt."""
    run_dir = Path(cfg.run_dir)
    turn = find_turn(run_dir, turn_id)
    names = ", ".join(tool["function"]["name"] for tool in turn.tools) or "none"
    lines = [
        f"turn      {turn.id}   (task {turn.task_id}, depth {turn.depth}, split {turn.split}, domain {turn.domain})",
        f"source    {turn.source}",
        f"flags     {', '.join(turn.flags) or 'none'}",
        f"tools     {names}",
        *_profile(run_dir, turn.id),
        "",
        "state",
    ]
    for message in turn.messages:
        name = f" {message['name']}{' (error)' if message.get('is_error') else ''}" if message["role"] == "tool" else ""
        lines += [f"--- {message['role']}{name}", *_body(message)]
    lines += ["", "demonstrated action", *_action(turn.demonstration)]
    if with_model:
        lines += ["", *_tokens(cfg, turn)]
    return "\n".join(lines)


def _profile(run_dir: Path, turn_id: str) -> list[str]:
    path = run_dir / "profile" / "turns.jsonl"
    for row in read_jsonl(path) if path.is_file() else ():
        if row["turn_id"] == turn_id:
            return [f"profile   mean {row['mean']}, variance {row['variance']}, rewards {row['rewards']}"]
    return []


def _body(message: JsonDict) -> list[str]:
    lines = [f"(thinking) {_cut(message['thinking'])}"] if message.get("thinking") else []
    if message.get("content"):
        lines.append(_cut(message["content"]))
    for call in message.get("tool_calls", ()):
        lines.append(f"call {call['name']} {_cut(json.dumps(call['arguments'], ensure_ascii=False))}")
    return lines


def _action(action: Action) -> list[str]:
    calls = [call.to_json() for call in action.tool_calls]
    return _body({"thinking": action.thinking, "content": action.text, "tool_calls": calls})


def _cut(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _tokens(cfg: Config, turn: Turn) -> list[str]:
    from pivotrl.models.builtin import resolve_model
    from pivotrl.rendering.chat import Renderer

    renderer = Renderer(resolve_model(cfg.model.path), cfg.model.chat_template, cfg.domain.action_format)
    prompt = renderer.prompt_ids(turn.messages, turn.tools)
    target = renderer.completion_ids(turn.demonstration)
    room = cfg.model.context_length - cfg.sampling.max_new_tokens
    beyond = " (beyond model.context_length)" if len(prompt) > room else ""
    tail = [f"{i:>8} {renderer.tokenizer.decode([i])!r}" for i in prompt[-TAIL_TOKENS:]]
    return [f"prompt    {len(prompt)} tokens{beyond}, action {len(target)} tokens; the prompt ends", *tail]
