"""Readers of agents' own files: what the model saw and did, in the shape of the schema."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl.errors import UserError
from pivotrl.trajectories import sources
from pivotrl.trajectories.formats import detect
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from tests.unit.test_reader import places


def only(path: Path) -> Trajectory:
    (item,) = read_trajectories(str(path))
    assert isinstance(item, Trajectory), item
    return item


def calls(item: Trajectory) -> list[tuple[str, dict[str, Any]]]:
    return [(c["name"], c["arguments"]) for m in item.messages for c in m.get("tool_calls", ())]


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_swe_agent_in_its_three_dialects(shared_data: Path) -> None:
    raw = shared_data / "swe/raw"
    called = only(raw / "sweagent_marshmallow_function_calling.traj")
    xml = only(raw / "sweagent_marshmallow_xml.traj")
    fenced = only(raw / "sweagent_humanevalfix_thought_action.traj")
    assert called.task_id == xml.task_id == "marshmallow-code__marshmallow-1867"
    assert calls(called)[0] == ("create", {"filename": "reproduce.py"})
    assert calls(xml)[0] == ("bash", {"command": "create reproduce.py"})
    assert calls(fenced)[0] == ("bash", {"command": "ls -a\n"})
    assert fenced.messages[2]["content"].endswith("what files and directories are available.")
    for item in (called, xml, fenced):
        turns = [t for t in split_turns(item, "train") if isinstance(t, Turn)]
        assert len(turns) == len(calls(item)) and not any("<command>" in t.demonstration.text for t in turns)
        assert [m["role"] for m in item.messages[:5]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m["content"] for m in xml.messages if m["role"] == "tool"][1].startswith("[File: /marshmallow")


def test_the_sweagent_sample_in_two_formats_gives_the_same_turns(shared_data: Path) -> None:
    own = only(shared_data / "swe/raw/sweagent_marshmallow_function_calling.traj")
    chat = next(
        item
        for item in read_trajectories(str(shared_data / "swe/sweagent_chat.jsonl"))
        if isinstance(item, Trajectory) and len(calls(item)) == len(calls(own))
    )
    assert calls(chat) == calls(own)


def test_demonstrations_in_a_history_are_not_trained_on(tmp_path: Path) -> None:
    history = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "t\n```\nls\n```", "thought": "t\n", "action": "ls\n", "is_demo": True},
        {"role": "user", "content": "files"},
        {"role": "assistant", "content": "t\n```\npwd\n```", "thought": "t\n", "action": "pwd\n"},
    ]
    first, second = split_turns(only(written(tmp_path / "x.traj", {"history": history})), "train")
    assert isinstance(first, Skip) and first.reason == "copied_context"
    assert isinstance(second, Turn) and second.demonstration.tool_calls[0].arguments == {"command": "pwd\n"}


def test_mini_swe_agent(shared_data: Path, tmp_path: Path) -> None:
    item = only(shared_data / "swe/raw/mini_swe_local.traj.json")
    assert calls(item)[0] == ("bash", {"command": "echo 'hello world'"})
    assert [m["role"] for m in item.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert item.messages[2]["content"] == "Here be some dummy command:"
    two = "```bash\nls\n```\n```bash\npwd\n```"
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": two}]
    messages += [{"role": "user", "content": "one, please"}, {"role": "assistant", "content": "```bash\nls\n```"}]
    row = {"trajectory_format": "mini-swe-agent-1", "messages": messages, "instance_id": "i"}
    skip, turn = split_turns(only(written(tmp_path / "x.traj.json", row)), "train")
    assert isinstance(skip, Skip) and skip.reason == "text_after_call"
    assert isinstance(turn, Turn) and turn.messages[-1] == {"role": "user", "content": "one, please"}


def test_text_syntax_is_flagged_or_kept_to_the_letter(shared_data: Path) -> None:
    """As calls, under a system text that asks for text: a flag. As text: what the model wrote and saw, no flag."""
    files = {
        "swe_agent": "swe/raw/sweagent_humanevalfix_thought_action.traj",
        "mini_swe": "swe/raw/mini_swe_local.traj.json",
    }
    for name, file in files.items():
        path = shared_data / file
        turns = [t for t in split_turns(only(path), "train") if isinstance(t, Turn)]
        assert turns and all("text_syntax" in t.flags and t.demonstration.tool_calls for t in turns)
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw = raw if isinstance(raw, list) else raw.get("history", raw.get("messages"))
        (item,) = read_trajectories(str(path), f"{name}_text")
        assert isinstance(item, Trajectory) and not item.tools
        said = [m["content"] for m in raw if m["role"] == "assistant"]
        assert [m["content"] for m in item.messages if m["role"] == "assistant"] == said
        assert {m["role"] for m in item.messages} == {"system", "user", "assistant"}
        kept = list(split_turns(item, "train"))
        assert len(kept) == len(turns) and not any("text_syntax" in t.flags for t in kept if isinstance(t, Turn))
    named = only(shared_data / "swe/raw/sweagent_marshmallow_function_calling.traj")
    assert not any("text_syntax" in t.flags for t in split_turns(named, "train") if isinstance(t, Turn))


def test_only_the_tool_section_is_cut_from_a_system_text(tmp_path: Path) -> None:
    listed = '<tools>\n{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}\n</tools>'
    how = "For each call write\n<tool_call>\n{...}\n</tool_call>"
    said = {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}

    def read(text: str, **extra: Any) -> Trajectory:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "u"}, said]
        return only(written(tmp_path / "x.jsonl", {"messages": messages, **extra}))

    after = read(f"Be kind.\n\n# Tools\n\n{listed}\n\n{how}\n\nNever refund.")
    assert after.messages[0]["content"] == "Be kind.\n\nNever refund." and after.tools[0]["function"]["name"] == "f"
    assert "text_syntax" not in after.meta
    twice = read(f"Be kind.\n\n# Tools\n\n{listed}\n\n{how}", tools=[{"name": "g"}])  # the field counts
    assert twice.messages[0]["content"] == "Be kind." and [t["function"]["name"] for t in twice.tools] == ["g"]
    other = read(f"Werkzeuge: {listed} {how}")
    assert other.messages[0]["content"].startswith("Werkzeuge") and other.meta["text_syntax"] is True
    assert read("Say <tools>[oops</tools>", tools=[{"name": "g"}]).meta["text_syntax"] is True
    messages = [{"role": "system", "content": "Say <tools>[oops</tools>"}, {"role": "user", "content": "u"}, said]
    (skip,) = read_trajectories(str(written(tmp_path / "x.jsonl", {"messages": messages})))
    assert isinstance(skip, Skip) and skip.reason == "bad_tools"


@pytest.mark.parametrize(
    ("broken", "good"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>', '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),  # noqa: E501
        ("<function=f>\n<parameter=a>1</parameter>", "<function=f>\n</function>"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_no_demonstration_and_stays_in_later_states(tmp_path: Path, broken: str, good: str) -> None:
    said = ["u", broken, "<tool_response>\nbad call\n</tool_response>", good, "<tool_response>\nok\n</tool_response>", "done"]  # noqa: E501  # fmt: skip
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    skip, turn, last = split_turns(only(written(tmp_path / "x.jsonl", {"messages": messages})), "train")
    assert isinstance(skip, Skip) and skip.reason == "malformed_tool_call" and skip.detail
    assert isinstance(turn, Turn) and turn.messages == messages[:3] and turn.demonstration.tool_calls[0].name == "f"
    assert isinstance(last, Turn) and [m["role"] for m in last.messages[3:]] == ["assistant", "tool"]


def test_recorded_failures_of_calls_are_flagged(shared_data: Path, tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no luck", "is_error": True}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "a"},
    ]
    first, second = split_turns(only(written(tmp_path / "a.jsonl", {"messages": messages})), "train")
    assert isinstance(first, Turn) and isinstance(second, Turn)
    assert (first.flags, second.flags, second.messages[-1]["is_error"]) == (["next_error"], ["last"], True)
    run = json.loads((shared_data / "tau2/simulation_run_example.json").read_text())
    next(m for m in run["messages"] if m["role"] == "tool")["error"] = True
    flags = [t.flags for t in split_turns(only(written(tmp_path / "t.json", run)), "train") if isinstance(t, Turn)]
    assert sum("next_error" in found for found in flags) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tool_calls": ["f()"]}, "bad_tool_calls"),
        ({"tool_calls": {"a": 1}}, "bad_tool_calls"),
        ({"observation": "done"}, "bad_messages"),
        ({"observation": {"results": ["done"]}}, "bad_messages"),
    ],
)
def test_parts_of_a_step_are_never_dropped(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    steps = [{"source": "user", "message": "u"}, {"source": "agent", "message": "a", **change}]
    row = {"schema_version": "ATIF-v1.8", "steps": steps}
    (skip,) = read_trajectories(str(written(tmp_path / "x.json", row)))
    assert isinstance(skip, Skip) and skip.reason == reason


def test_swe_smith_xml(shared_data: Path) -> None:
    item = only(shared_data / "swe/swesmith_xml_chat.jsonl")
    names = [tool["function"]["name"] for tool in item.tools]
    assert names == ["bash", "submit", "str_replace_editor"]
    edit = item.tools[2]["function"]["parameters"]
    assert edit["required"] == ["command", "path"] and edit["properties"]["view_range"]["type"] == "array"
    assert edit["properties"]["command"]["enum"] == ["view", "create", "str_replace", "insert", "undo_edit"]
    assert "BEGIN FUNCTION" not in item.messages[0]["content"] and "<function=" not in item.messages[0]["content"]
    assert calls(item)[1][1]["view_range"] == [6035, 6050]
    results = [m["content"] for m in item.messages if m["role"] == "tool"]
    assert len(results) == 36 and not any(text.startswith("OBSERVATION") for text in results)
    edits = [arguments["new_str"] for _, arguments in calls(item) if "new_str" in arguments]
    assert any(text.startswith("        ") for text in edits)  # indentation is kept


def test_openhands_events(shared_data: Path, tmp_path: Path) -> None:
    item = only(shared_data / "swe/raw/openhands_events_basic.json")
    assert [m["role"] for m in item.messages] == ["user", "assistant", "tool", "assistant"]
    assert [name for name, _ in calls(item)] == ["str_replace_editor", "finish"]
    assert item.messages[2]["content"].startswith("File created successfully")
    events = json.loads((shared_data / "swe/raw/openhands_events_basic.json").read_text())
    row = {"instance_id": "i1", "history": events, "test_result": {"report": {"resolved": True}}}
    output = only(written(tmp_path / "output.jsonl", row))
    assert (output.messages, output.task_id, output.meta["reward"]) == (item.messages, "i1", 1.0)
    pairs = only(written(tmp_path / "old.jsonl", {"instance_id": "i1", "history": [events[1:3]]}))
    assert pairs.messages == item.messages[1:3]
    bare = [{"source": "agent", "action": "run", "args": {"command": "ls"}}]
    (skip,) = [i for i in read_trajectories(str(written(tmp_path / "e.jsonl", {"events": bare}))) if i]
    assert isinstance(skip, Skip) and skip.reason == "unsupported_event"


def test_terminus_stays_text_and_malformed_turns_are_left_out(shared_data: Path, tmp_path: Path) -> None:
    skipped = []
    for item in read_trajectories(str(shared_data / "terminal/terminus2_textjson_chat.jsonl")):
        assert isinstance(item, Trajectory) and not calls(item)
        skipped += [turn for turn in split_turns(item, "train") if isinstance(turn, Skip)]
    # The one turn that says {"task_complete": true} and nothing else.
    assert [(s.id, s.reason, s.detail) for s in skipped] == [
        ("terminus2_text_0#10", "malformed_action", "missing_field")
    ]
    good = '{"state_analysis": "a", "explanation": "b", "commands": [{"keystrokes": "ls\\n", "is_blocking": true}]}'
    said = [good, '{"commands": [', good]
    messages = [m for text in said for m in ({"role": "user", "content": "$"}, {"role": "assistant", "content": text})]
    turns = list(split_turns(only(written(tmp_path / "x.json", {"messages": messages})), "train"))
    assert [t.reason if isinstance(t, Skip) else t.demonstration.text for t in turns] == [
        good, "malformed_action", good,
    ]  # fmt: skip


def test_tau2_runs_and_result_files(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "tau2/simulation_run_example.json"
    item = only(file)
    assert (item.id, item.task_id, item.meta["reward"]) == ("8b833b70-5692-4c4d-9bcb-ca7de5e5a316", "50", 1.0)
    run = json.loads(file.read_text())
    call = {"id": "u1", "name": "toggle", "arguments": {}, "requestor": "user"}
    run["messages"][2:2] = [
        {"role": "user", "content": None, "tool_calls": [call]},
        {"role": "tool", "id": "u1", "content": "ok", "requestor": "user"},
    ]
    results = {"info": {"environment_info": {"policy": "P", "domain_name": "retail"}}, "tasks": [], "simulations": []}
    results["simulations"] = [run, {**run, "id": "other"}, {"messages": 3}]
    first, second, bad = read_trajectories(str(written(tmp_path / "r.json", results)))
    assert isinstance(first, Trajectory) and isinstance(second, Trajectory) and isinstance(bad, Skip)
    assert first.messages == [{"role": "system", "content": "P"}, *item.messages] and first.domain == "retail"
    assert second.id == "other" and bad.reason == "bad_messages"


def test_webdancer_rows_are_the_prepared_ones(shared_data: Path) -> None:
    raw = list(read_trajectories(str(shared_data / "search/webdancer_hermes_raw.jsonl")))
    chat = [i for i in read_trajectories(str(shared_data / "search/webdancer_chat.jsonl")) if isinstance(i, Trajectory)]
    by_question = {next(m["content"] for m in i.messages if m["role"] == "user").strip(): i for i in chat}
    tasks = set()
    for item in raw:
        assert isinstance(item, Trajectory)
        same = by_question[next(m["content"] for m in item.messages if m["role"] == "user").strip()]
        assert calls(item) == calls(same)
        tasks.add(item.task_id)
    assert len(tasks) == 6


def test_copied_context_of_atif_is_not_trained_on(shared_data: Path, tmp_path: Path) -> None:
    row = json.loads((shared_data / "formats/atif_v1_8.json").read_text())
    agent = [step for step in row["steps"] if step["source"] == "agent"]
    agent[0]["is_copied_context"] = True
    first, *rest = split_turns(only(written(tmp_path / "x.json", row)), "train")
    assert isinstance(first, Skip) and first.reason == "copied_context"
    assert len(rest) == 3 and all(isinstance(turn, Turn) for turn in rest)
    assert isinstance(only(shared_data / "terminal/terminus2_0.atif.json"), Trajectory)


def test_messages_as_a_json_string(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    item = only(written(tmp_path / "x.jsonl", {"traj_id": "t", "messages": json.dumps(messages), "resolved": False}))
    assert (item.messages, item.id, item.meta["reward"]) == (messages, "t", 0.0)


ROWS = [{"id": str(i), "messages": [{"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": "a"}]} for i in range(40)]  # noqa: E501  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="extra zst")
def test_zst(tmp_path: Path) -> None:
    import zstandard

    data = "\n".join(json.dumps(row) for row in ROWS).encode()
    packed = zstandard.compress(data[:500]) + zstandard.compress(data[500:])
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert [i.id for i in read_trajectories(str(tmp_path))] == [row["id"] for row in ROWS]
    (tmp_path / "x.jsonl.zst").write_bytes(b"not zstd at all")
    (skip,) = read_trajectories(str(tmp_path))
    assert isinstance(skip, Skip) and skip.reason == "bad_compression"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="extra parquet")
def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    other = {"id": "d", "function": {"name": "g", "arguments": {"a": None, "b": "x"}}}
    messages = [
        {"role": "user", "content": "u", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
    ]
    rows = [{"id": "p", "messages": messages}, *ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    items = list(read_trajectories(str(tmp_path)))
    assert [i.id for i in items] == ["p", *(row["id"] for row in ROWS)]
    assert isinstance(items[0], Trajectory) and calls(items[0]) == [("f", {"a": 1}), ("g", {"b": "x"})]
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    (skip,) = read_trajectories(str(tmp_path))
    assert isinstance(skip, Skip) and skip.reason == "bad_parquet"


@pytest.mark.parametrize(("name", "extra"), [("x.jsonl.zst", "zst"), ("x.parquet", "parquet")])
def test_a_missing_codec_names_its_extra(
    tmp_path: Path, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(sources.importlib, "import_module", missing)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"{name}.*pivotrl\[{extra}\]"):
        list(read_trajectories(str(tmp_path / name)))


def test_folders_and_globs_mix_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    written(tmp_path / "a/one.jsonl", ROWS[0])
    (tmp_path / "a/two.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[1:4]).encode()))
    (tmp_path / "a/notes.txt").write_text("no trajectory")
    written(tmp_path / "a/three.traj", ROWS[5]["messages"])
    for place in (tmp_path, tmp_path / "**/*.*s*"):
        found = [i.id for i in read_trajectories(str(place)) if isinstance(i, Trajectory)]
        assert found[:4] == (["0", "a/three.traj:1", "1", "2"] if place == tmp_path else ["0", "1", "2", "3"])


def test_every_shared_row_has_one_reader(shared_data: Path) -> None:
    expected = {
        "swe/raw/sweagent_marshmallow_xml.traj": "swe_agent",
        "tau2/simulation_run_example.json": "tau2",
        "tau_bench/airline_sft.jsonl": "openai_chat",
        "search/webdancer_hermes_raw.jsonl": "webdancer",
        "swe/swesmith_xml_chat.jsonl": "function_xml",
        "terminal/terminus2_textjson_chat.jsonl": "terminus",
    }
    for name, format in expected.items():
        file = shared_data / name
        text = file.read_text(encoding="utf-8")
        found = detect(json.loads(text if name.endswith((".json", ".traj")) else text.split("\n")[0]))
        assert found is not None and found.name == format, name


@pytest.mark.parametrize(
    "name",
    ["swe/raw/sweagent_function_calling_simple.traj", "swe/raw/sweagent_humanevalfix_thought_action.traj",
     "swe/raw/mini_swe_local.traj.json", "swe/raw/openhands_events_basic.json", "tau2/simulation_run_example.json",
     "search/webdancer_hermes_raw.jsonl", "swe/swesmith_xml_chat.jsonl", "terminal/terminus2_textjson_chat.jsonl"],
)  # fmt: skip
def test_a_file_broken_anywhere_is_read_or_skipped(shared_data: Path, tmp_path: Path, name: str) -> None:
    """Values of a row are replaced, at up to 150 places, by values of other types: no exception but a `UserError`."""
    text = (shared_data / name).read_text(encoding="utf-8")
    text = text.split("\n")[0] if name.endswith(".jsonl") else text
    row = {"messages": value} if isinstance(value := json.loads(text), list) and "role" in value[0] else value
    row = {"events": row} if isinstance(row, list) else row
    strange: list[Any] = [None, 7, True, "", "x", [], {}, [None], [[]], {"a": {}}, ["x"], {"type": "text"}]
    found = places(row)
    rows = []
    for i, place in enumerate(found[1 :: max(len(found) // 150, 1)]):
        copy = json.loads(json.dumps(row))
        parent = copy
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = strange[i % len(strange)]
        rows.append({**copy, "n": i})
    file = tmp_path / "broken.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in [*rows, ROWS[0]]), encoding="utf-8")
    items = list(read_trajectories(str(file)))
    assert len(items) == len(rows) + 1 > 10
    for item in items:
        if isinstance(item, Trajectory):
            assert all(isinstance(m.get("content", ""), str) for m in item.messages)
            list(split_turns(item, "train"))
