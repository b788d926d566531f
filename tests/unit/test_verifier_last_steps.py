"""What shell, edits and search ask last: the sandbox and the judge. And the domains' configurations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_turns import call, turn
from test_sandbox import needs_bwrap
from verifier_doubles import act, tool
from verifier_doubles import call as tool_call
from verifier_doubles import turn as tool_turn

from pivotrl.config import VerifierConfig
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers import judge as judge_module
from pivotrl.verifiers import sandbox
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.edits import EditsVerifier
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.search import Search
from pivotrl.verifiers.shell import ShellVerifier
from pivotrl.verifiers.strings import string_rule

ENDPOINT = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


def run(one: str, other: str, state: list[dict[str, Any]] | None = None, **options: Any) -> Verdict:
    verifier = ShellVerifier({"execution": True, **options})
    return verifier.verify(turn(call("bash", command=one), state), call("bash", command=other))


SEEN = [
    {"role": "assistant", "tool_calls": [{"id": "c", "name": "read", "arguments": {"path": "/app/n.txt"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "3\n1\n2\n"},
]


@needs_bwrap
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cat a.txt | sort", "sort a.txt"),
        ("printf 'x\\ny\\n' > out", "echo x > out; echo y >> out"),
        ("mkdir d && touch d/f", "mkdir d && : > d/f"),
        ("grep -c line a.txt", "grep line a.txt | wc -l"),
        ("cp a.txt b2 && rm a.txt", "mv a.txt b2"),
    ],
)
def test_same_effect_is_right(one: str, other: str):
    assert ShellVerifier({}).verify(turn(call("bash", command=one)), call("bash", command=other)).reward == 0.0
    assert (run(one, other).reward, run(one, other).reason) == (1.0, "same_effect")
    assert run(other, one).reward == 1.0


@needs_bwrap
@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("rm a", "rm b", "effect_differs"),  # neither is known: both are made up, so that they differ
        ("rm -f a", "rm -f b", "effect_differs"),
        ("cp a b", "cp b a", "effect_differs"),
        ("echo done; rm -f a", "echo done; rm -f b", "effect_differs"),
        ("echo 1", "echo 2", "effect_differs"),
        ("true", "rm -rf a", "command_differs"),  # the demonstration shows nothing
        ("make", "make all", "command_differs"),  # no such program, or no such target: nothing is seen
        ("true", ":", "command_differs"),  # nothing to see
        ("date +%N", "date +%s%N", "command_differs"),  # not the same twice
        ("sleep 30", "sleep 31", "command_differs"),
        ("cat /etc/shadow", "cat /etc/passwd", "command_differs"),
    ],
)
def test_other_effects_and_nothing_to_see_are_wrong(one: str, other: str, reason: str):
    verdict = run(one, other, execution_seconds=1.0)
    assert (verdict.reward, verdict.reason) == (0.0, reason), verdict


@needs_bwrap
def test_files_that_the_state_shows_are_there():
    for one, other in (("sort /app/n.txt", "sort -n /app/n.txt"), ("cd /app && sort n.txt", "sort /app/n.txt | cat")):
        assert run(one, other, SEEN).reward == 1.0, (one, other)
    assert run("head -n1 /app/n.txt", "tail -n1 /app/n.txt", SEEN).reward == 0.0


@needs_bwrap
def test_through_edits_and_terminus():
    state = [{"role": "user", "content": "root@box:/app# "}]
    keys = [
        turn(call("bash_command", keystrokes=k), state) for k in ("printf 'a\\n' > x\n", "echo a > x\n", "echo b > x\n")
    ]
    verifier = ShellVerifier({"execution": True})
    assert verifier.verify(keys[0], keys[1].demonstration).reason == "same_effect"
    assert verifier.verify(keys[0], keys[2].demonstration).reason == "effect_differs"
    edits = EditsVerifier({"execution": True})
    assert edits.verify(turn(call("bash", command="cat a | sort")), call("bash", command="sort a")).reward == 1.0
    assert edits.config()["execution"] is True


def test_execution_refuses_without_a_sandbox(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "unusable", lambda: "bwrap is not installed")
    for make in (ShellVerifier, EditsVerifier):
        with pytest.raises(UserError, match="bwrap is not installed"):
            make({"execution": True})
    assert ShellVerifier({"execution": False}).sandbox is None
    monkeypatch.undo()
    for wrong in ({"execution": "yes"}, {"execution": True, "execution_seconds": 0}, {"execution_seconds": "1"}):
        with pytest.raises(UserError, match="execution"):
            ShellVerifier(wrong)


class Asked:
    """A judge that notes what it is asked."""

    def __init__(self, options: dict[str, Any], reward: float | None = 1.0) -> None:
        self.reward, self.options = reward, options
        self.actions: list[Action] = []

    def config(self) -> dict[str, Any]:
        return {"model": "m"}

    def verify(self, turn: Any, action: Action) -> Verdict:
        self.actions.append(action)
        return Verdict(self.reward, "judge_equivalent" if self.reward else "judge_down", {"judge": []})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    made: list[Asked] = []

    def make(options: dict[str, Any]) -> Asked:
        judge_module.read_options("judge", options, judge_module._DEFAULTS)
        made.append(Asked(options))
        return made[-1]

    monkeypatch.setattr("pivotrl.verifiers.texts.Judge", make)  # where every verifier gets its own
    return made


def test_the_judge_of_the_shell_comes_last(asked: list[Asked]):
    verifier = ShellVerifier({"judge": ENDPOINT})
    state = turn(call("bash", command="ls"))
    for action, reward in (
        (call("bash", command="ls ."), 1.0),  # rules
        (call("bash", command=""), 0.0),
        (Action("ls"), 0.0),
        (Action(problems=("not closed",)), 0.0),
        (call("python", code="ls"), 0.0),
    ):
        assert verifier.verify(state, action).reward == reward
    assert asked[0].actions == []
    verdict = verifier.verify(state, call("bash", command="find . -maxdepth 1"))
    assert (verdict.reward, verdict.details["rules"]) == (1.0, "command_differs")
    text = turn(Action("All tests pass now."))
    assert verifier.verify(text, Action("Every test passes.")).reward == 1.0
    assert verifier.verify(text, Action(" ")).reward == 0.0
    asked[0].reward = None
    assert verifier.verify(text, Action("Every test passes.")).reward is None
    assert verifier.config()["judge"] == {"model": "m"}
    assert "judge" not in ShellVerifier({}).config()


@needs_bwrap
def test_what_the_sandbox_found_different_is_not_judged(asked: list[Asked]):
    verifier = ShellVerifier({"judge": ENDPOINT, "execution": True})
    assert verifier.verify(turn(call("bash", command="rm a")), call("bash", command="rm b")).reward == 0.0
    assert asked[0].actions == []
    assert verifier.verify(turn(call("bash", command="make")), call("bash", command="make all")).reward == 1.0


def test_the_judge_of_search(asked: list[Asked]):
    verifier = Search({"judge": ENDPOINT})
    tools = (tool("search", query={"type": "string"}), tool("visit", url={"type": "string"}, goal={"type": "string"}))
    query = tool_turn(act(tool_call("search", query="height of the Eiffel tower")), *tools)
    visit = tool_turn(act(tool_call("visit", url="https://a.org/x", goal="its height")), *tools)
    assert verifier.verify(query, act(tool_call("search", query="the Eiffel tower height of"))).reward == 1.0
    assert verifier.verify(visit, act(tool_call("visit", url="https://a.org/y", goal="its height"))).reward == 0.0
    assert verifier.verify(query, act(tool_call("visit", url="https://a.org/x", goal="g"))).reward == 0.0
    assert asked[0].actions == []
    verdict = verifier.verify(query, act(tool_call("search", query="how tall is the Eiffel tower")))
    assert (verdict.reward, verdict.details["rules"]) == (1.0, "argument_differs:query")
    verdict = verifier.verify(visit, act(tool_call("visit", url="https://a.org/x", goal="how tall it is")))
    assert (verdict.reward, verdict.details["rules"]) == (1.0, "argument_not_settled:goal")
    assert verifier.config()["judge"] == {"model": "m"}
    assert "judge" not in Search({}).config()


def test_bad_judges():
    for make in (ShellVerifier, EditsVerifier, Search):
        with pytest.raises(UserError, match="judge"):
            make({"judge": {"base_url": "http://x/v1"}})


@pytest.mark.parametrize(
    ("domain", "name"),
    [
        ("terminal", "shell"),
        ("swe", "edits"),
        ("search", "search"),
        ("tau2", "tool_calls"),
        ("outfitters", "execution"),
    ],
)
def test_each_domain_has_its_verifier(domain: str, name: str):
    settings = load_config([f"domain={domain}"]).domain.verifier
    assert (settings.name, get_verifier(settings).name) == (name, name)


@pytest.mark.parametrize("domain", ["terminal", "swe", "search"])
def test_the_switches_work_from_the_command_line(domain: str):
    judged = load_config([f"domain={domain}", 'domain.verifier.options.judge={base_url: "http://x/v1", model: m}'])
    assert get_verifier(judged.domain.verifier).config()["judge"]["model"] == "m"


def test_the_judge_of_a_field_of_a_call(asked: list[Asked]):
    verifier = get_verifier(
        VerifierConfig("tool_calls", {"strings": {"say.text": "judge"}, "text": "judge", "judge": ENDPOINT})
    )
    say = tool("say", ["to"], to={"type": "string"}, text={"type": "string"})
    state = tool_turn(act(tool_call("say", to="Ann", text="It is done.")), say)
    for action, reward in (
        (act(tool_call("say", to="Ann", text="It is done.")), 1.0),
        (act(tool_call("say", to="Bob", text="All done.")), 0.0),
        (act(tool_call("say", to="Ann", text="")), 0.0),
        (act(tool_call("say", to="Ann")), 0.0),
        (act(tool_call("say", to="Ann", text="It is done."), tool_call("say", to="Ann", text="x")), 0.0),
    ):
        assert verifier.verify(state, action).reward == reward
    assert asked[0].actions == []
    assert verifier.verify(state, act(tool_call("say", to="Ann", text="All done."))).reason == "judge_equivalent"
    assert verifier.verify(tool_turn(Action("Hello."), say), Action("Hi!")).reason == "judge_equivalent"
    asked[0].reward = None
    assert verifier.verify(state, act(tool_call("say", to="Ann", text="All done."))).reward is None
    assert verifier.config()["judge"] == {"model": "m"}
    for options in ({"text": "judge"}, {"strings": {"say.text": "judge"}}):
        with pytest.raises(UserError, match="judge is missing"):
            get_verifier(VerifierConfig("tool_calls", options))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2024-05-01", "May 1, 2024", True),
        ("2024-05-01", "1st of May 2024", True),
        ("2024-05-01", "2024-5-1", True),
        ("2024-05-01", "2024-05-02", False),
        ("2024-05-01", "05/01/2024", False),  # or the fifth of January
        ("2024-05-01", "May 1", False),
        ("2024-05-01", "2024-05-01T00:00:00", False),
        ("2024-05-01T10:00:00Z", "2024-05-01 12:00:00+02:00", True),
        ("2024-05-01T10:00:00Z", "2024-05-01T10:00:00+00:00", True),
        ("2024-05-01T10:00:00Z", "2024-05-01T10:00:00", False),
        ("2024-05-01T10:00", "2024-05-01 10:00:00", True),
        ("10:00", "10:00:00", True),
        ("10:00", "10:00 AM", True),
        ("22:00", "10 pm", True),
        ("10:00", "10 pm", False),
        ("12:00", "12 pm", True),
        ("00:00", "12 am", True),
        ("tomorrow", "tomorrow", True),
        ("tomorrow", "Tomorrow", False),
        ("2024-06-31", "June 31, 2024", False),
        ("25:00", "25:00:00", False),
    ],
)
def test_dates_and_times_in_equal_notations(one: str, other: str, same: bool):
    rule = string_rule("date", "here")
    assert rule(one, other) is rule(other, one) is same
    by_format = tool("book", when={"type": "string", "format": "date-time"})
    state = tool_turn(act(tool_call("book", when=one)), by_format)
    verdict = get_verifier(VerifierConfig("tool_calls", {})).verify(state, act(tool_call("book", when=other)))
    assert verdict.reward == float(same)
    plain = tool_turn(act(tool_call("book", when=one)), tool("book", when={"type": "string"}))
    verdict = get_verifier(VerifierConfig("tool_calls", {})).verify(plain, act(tool_call("book", when=other)))
    assert verdict.reward == float(one == other)


@given(st.text(max_size=20), st.text(max_size=20))
def test_moments_are_total_and_symmetric(one: str, other: str):
    rule = string_rule("date", "here")
    assert rule(one, other) == rule(other, one)
    assert rule(one, one)
