"""Prompts of many states: the cache on disk, and what a stage keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_profile import Equal, Letters

from pivotrl.errors import UserError
from pivotrl.local_rollouts import duplicate_prompts, render_states
from pivotrl.rendering import prompts
from pivotrl.rendering.prompts import PromptCache, default_workers, prompts_of
from pivotrl.trajectories.schema import Action, Turn


class Counting(Letters):
    def __init__(self, name: str = "letters") -> None:
        self.rendered, self.name = 0, name

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[int]:  # type: ignore[override]
        self.rendered += 1
        return super().prompt_ids(list(messages), list(tools))

    def fingerprint(self) -> str:
        return self.name


def state(text: str) -> tuple[list[dict[str, Any]], list[Any]]:
    return [{"role": "user", "content": text}], []


def rendered(texts: str, renderer: Any, cache: Path | None = None) -> list[str]:
    found = prompts_of([state(text) for text in texts.split()], renderer, cache=cache)
    return ["".join(map(chr, ids)) for ids in found]


def test_a_second_stage_renders_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "PER_FILE", 2)
    first, second, other = Counting(), Counting(), Counting("another template")
    assert rendered("a bb é日 a", first, tmp_path) == ["a", "bb", "é日", "a"]
    assert len(list(tmp_path.glob("*.ids"))) == 2 and not list(tmp_path.glob("*.tmp"))
    assert rendered("é日 new a bb", second, tmp_path) == ["é日", "new", "a", "bb"] and second.rendered == 1
    assert rendered("a bb", other, tmp_path) == ["a", "bb"] and other.rendered == 2
    assert rendered("a bb", first) == ["a", "bb"] and first.rendered == 6  # no cache: rendered
    keys = PromptCache(tmp_path, "f")
    one, two = ({"role": "user", "content": "a", **extra} for extra in ({"x": 1}, {"x": 2}))
    assert keys.key(([one], [])) != keys.key(([two], [])) != keys.key(([], [two]))


def test_a_killed_writer_leaves_no_half_file_and_a_cut_one_is_named(tmp_path: Path) -> None:
    renderer = Counting()
    partly = prompts_of([state(text) for text in "abcdef"], renderer, cache=tmp_path)
    next(partly)
    partly.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("*"))
    assert rendered("a b", renderer, tmp_path) == ["a", "b"]
    (file,) = tmp_path.glob("*.ids")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{file.name} is cut short"):
        rendered("a b", renderer, tmp_path)


def test_equal_ids_are_one_object() -> None:
    first, second = prompts_of([state("日本"), state("日本")], Counting())  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_workers_share_the_node_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts.os, "sched_getaffinity", lambda process: set(range(64)))
    assert default_workers() == prompts.MOST_WORKERS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "128")
    assert default_workers() == 1


def test_turns_of_equal_prompt_and_action_are_one(tmp_path: Path) -> None:
    """Messages that differ where the template does not look (here: thinking) make no other turn."""
    seen = Turn("a#0", "a", "a", 0, "d", "train", state("same")[0], [], Action("x"), "f:1")
    thought = [{**seen.messages[0], "thinking": "hm"}]
    again, other = replace(seen, id="b#0", messages=thought), replace(seen, id="c#0", demonstration=Action("y"))
    turns, fakes = [seen, again, other], (Letters(), Equal())
    copies = duplicate_prompts(turns, fakes[0])  # type: ignore[arg-type]
    states, skipped = render_states(turns, *fakes, 100, 4, duplicates=copies)  # type: ignore[arg-type]
    assert [s.turn.id for s in states] == ["a#0", "c#0"]
    assert [(s.turn_id, s.reason) for s in skipped] == [("b#0", "duplicate_prompt")]
    assert len(render_states(turns, *fakes, 100, 4)[0]) == 3  # type: ignore[arg-type]

    class Shows(Letters):
        def prompt_ids(self, messages: Any, tools: Any) -> list[int]:
            return super().prompt_ids([{"content": m.get("thinking", "") + m["content"]} for m in messages], tools)

    assert duplicate_prompts(turns, Shows()) == set()  # type: ignore[arg-type]
