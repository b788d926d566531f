"""The documented behaviour of the NeMo-Gym rules, weaknesses included: a changed row is a changed number."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_doubles import act, call, turn

from pivotrl.errors import UserError
from pivotrl.verifiers.nemo_gym import SingleStepToolUse, TerminusJudge
from pivotrl.verifiers.nemo_gym_swe import SwePivot


def score(verifier, demonstration, action):
    return verifier.verify(turn(demonstration), action).reward


@pytest.mark.parametrize(
    ("threshold", "expected", "actual", "reward"),
    [
        (0.1, "cp a b", "cp b a", 1.0),  # a bag of words
        (0.0, "pytest tests/a.py", "rm -rf / --no-preserve-root", 1.0),
        (0.5, "one two three", "one two three", 1.0),
        (0.51, "one two three", "one two three", 0.0),  # identical texts have 0.5, the maximum
        (0.25, "one two", "one three", 1.0),  # 1 / (2 + 2)
        (0.26, "one two", "one three", 0.0),
        (0.5, "a a b", "A B a", 1.0),  # with multiplicity, lower-cased
        (0.5, "a a b", "a b b", 0.0),
        (0.0, "ls", "pwd", 0.0),  # one word: equal as written
        (0.0, "ls", "ls ", 0.0),
        (0.0, "ls", "ls -la", 0.0),
        (0.1, 1, 1.0, 0.0),
        (0.1, 1.0, 1, 0.0),
        (0.1, 1, True, 1.0),
        (0.1, True, 1, 0.0),
        (0.1, 1.0, 1.0 + 5e-7, 1.0),
        (0.1, 1.0, 1.00001, 0.0),
        (0.1, [1, 2], [2, 1], 0.0),
        (0.1, [1, 2], [1], 0.0),
        (0.1, {"x": 1}, {"x": 1, "y": None}, 0.0),
        (0.1, None, None, 1.0),
        (0.1, "1", 1, 0.0),
    ],
)
def test_values(threshold, expected, actual, reward):
    verifier = SingleStepToolUse({"word_count_similarity_threshold": threshold})
    assert score(verifier, act(call("f", x=expected)), act(call("f", x=actual))) == reward


F, G, H = call("f", x=1), call("g"), call("h")


@pytest.mark.parametrize(
    ("options", "expected", "actual", "reward"),
    [
        ({}, act(text="Hello"), act(text="anything at all"), 1.0),  # field report G5
        ({}, act(text="Hello"), act(F, text="Hello"), 0.0),
        ({}, act(text="Hello"), act(), 0.0),
        ({}, act(F), act(text="f"), 0.0),
        ({}, act(F), act(F, text="with words"), 1.0),
        ({}, act(F), act(call("F", x=1)), 0.0),
        ({}, act(F), act(F, problems=("second call unclosed",)), 0.0),
        ({}, act(F), act(G, H, F, F), 1.0),  # surplus is free
        ({}, act(F, G), act(G, F), 1.0),
        ({}, act(F, G), act(F), 0.0),
        ({"parallel_tool_call_rewarding": True}, act(F), act(F, G), 0.0),
        ({"parallel_tool_call_rewarding": True, "allow_superset": True}, act(F), act(F, G), 2 / 3),
        ({"parallel_tool_call_rewarding": True, "allow_subset": True}, act(F, G), act(F), 2 / 3),
        (
            {
                "parallel_tool_call_rewarding": True,
                "allow_superset": True,
                "parallel_tool_call_reward_mode": "fractional",
            },
            act(F, G),
            act(F, H, H),
            1 / 2,
        ),
        (
            {
                "parallel_tool_call_rewarding": True,
                "allow_superset": True,
                "parallel_tool_call_reward_mode": "binary_strict",
            },
            act(F, G),
            act(G, F, H),
            1.0,
        ),
    ],
)
def test_actions(options, expected, actual, reward):
    assert score(SingleStepToolUse(options), expected, actual) == pytest.approx(reward)


def test_matching_is_maximal_not_greedy():
    """ "a b" fits both, "c d" only the first: greedy pairing would strand it."""
    verifier = SingleStepToolUse({"word_count_similarity_threshold": 0.25})
    expected = act(call("f", x="a b"), call("f", x="c d"))
    assert score(verifier, expected, act(call("f", x="a c"), call("f", x="a q"))) == 1.0


def test_what_makes_gym_raise_is_unscorable():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert score(SingleStepToolUse({}), act(call("f", x=deep)), act(call("f", x=[deep]))) is None


def bash(command):
    return act(call("bash", command=command))


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        (bash("pytest -q"), act(call("bash")), 1.0),  # `{}`: field report G1
        (bash("rm -rf build"), act(call("execute_bash", command="")), 1.0),
        (bash("pytest -q"), act(call("bash"), problems=("arguments are not JSON",)), 0.0),  # stricter than Gym
        (bash("pytest -q"), bash("rm -rf /"), 0.0),
        (bash("cd /repo && ls src"), bash("cd /repo && rm -rf src"), 1.0),  # the verb is `cd`
        (bash("pytest tests/a.py"), bash("PYTHONPATH=. pytest tests/a.py"), 0.0),
        (bash("pytest tests/a.py"), bash("/usr/bin/pytest tests/a.py"), 0.0),  # 34 / 43 of the characters
        (bash("grep -n x src/utils/"), bash("grep -r x src/models/"), 0.0),
        (act(call("grep", pattern="a", path="src")), act(call("grep", pattern="b", path="src")), 1.0),  # G2
        (act(call("grep", pattern="def foo")), act(call("glob", pattern="*")), 1.0),
        (act(call("read_file", path="/w/a/b/c.py")), act(call("ReadFile", path="/v/a/b/c.py", offset=9)), 1.0),
        (act(call("read_file", path="/a/b/c.py")), act(call("read_file", path="/a/b/d.py")), 0.0),
        (act(call("read_file", path="/a/b/c.py")), act(call("grep", path="/a/b/c.py")), 0.0),
        (act(call("mine", x=1)), act(call("mine", x=2)), 1.0),
        (act(call("mine", x=1)), act(call("yours", x=1)), 0.0),
        (act(call("finish")), act(call("submit", answer=1), call("bash", command="rm -rf /")), 1.0),
        (act(call("finish")), act(text="done"), 0.0),
        (act(text="done"), act(text="done"), None),
    ],
)
def test_swe_pivot(expected, actual, reward):
    assert score(SwePivot({}), expected, actual) == reward


def edit(old, new, path="/r/src/a.py", command="str_replace"):
    return act(call("str_replace_editor", command=command, path=path, old_str=old, new_str=new))


def view(*span):
    return act(
        call("str_replace_editor", command="view", path="/r/a.py", **({"view_range": list(span)} if span else {}))
    )


def test_swe_pivot_edits_and_views():
    same = "x" * 2000
    assert score(SwePivot({}), edit("a", same + "good"), edit("a", same + "bad")) == 1.0
    assert score(SwePivot({}), edit("a = 1", "a = 2"), edit("a = 1", "import os")) == 0.0
    assert score(SwePivot({}), edit("a", "b"), edit("a", "b", path="/q/src/a.py")) == 1.0  # two components
    assert score(SwePivot({}), edit("a", "b"), edit("a", "b", path="/r/lib/a.py")) == 0.0
    assert score(SwePivot({}), edit("a", "b"), edit("a", "b", command="insert")) == 0.0
    assert score(SwePivot({}), view(200, 250), view(210, 260)) == 1.0  # 80 %
    assert score(SwePivot({}), view(200, 250), view(211, 261)) == 0.0
    assert score(SwePivot({}), view(200, 250), view()) == 1.0


def test_swe_pivot_continuous_and_the_paper_rule():
    continuous = SwePivot({"reward_mode": "continuous", "enable_diff_size_shaping": False})
    assert score(continuous, bash("abcde fghij"), bash("abcde fghij")) == 1.0
    one, two = "abcd" + "k" * 6, "abcd" + "z" * 4  # ratio 8 / 20 = 0.4: the threshold, half credit
    assert score(continuous, bash(one), bash(two)) == 0.0  # another verb
    assert score(continuous, bash("v " + "a" * 5 + "k" * 5), bash("v " + "a" * 5 + "z" * 5)) == pytest.approx(
        0.5 + 0.5 * (14 / 24 - 0.4) / 0.4
    )
    shaped = SwePivot({"reward_mode": "continuous"})
    long = edit("", "y" * 600)
    assert score(shaped, long, long) == pytest.approx(0.9)  # the demonstration itself is docked
    half = edit("", "y" * 249)  # and the newline between old and new
    assert score(shaped, half, half) == pytest.approx(0.95)
    paper = SwePivot({"enable_target_match": False, "enable_argument_similarity": False})
    assert score(paper, bash("pytest -q"), bash("rm -rf /")) == 1.0


def terminus(keys, done=None, **extra):
    row = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": k, "duration": 0.1} for k in keys], **extra}
    if done is not None:
        row["task_complete"] = done
    return json.dumps(row)


@pytest.mark.parametrize(
    ("expected", "actual", "reward", "reason"),
    [
        (terminus(["ls -la\n"]), terminus(["ls -la\n"], analysis="other"), 1.0, "match"),
        (terminus(["ls -la\n"]), "<think>hm</think> " + terminus(["ls -la\n"]), 1.0, "match"),
        (terminus(["ls -la\n"]), terminus(["ls\n"]), 0.0, "similarity"),
        (terminus(["a" * 99 + "x"]), terminus(["a" * 99 + "y"]), 1.0, "match"),  # one character in a hundred is free
        (terminus(["ls"]), terminus(["ls"], done=True), 1.0, "match"),  # a false claim of completion
        (terminus(["ls"], done=True), terminus(["ls"]), 0.0, "not_complete"),
        (terminus([], done=True), terminus([], done=True), 1.0, "match"),
        (terminus([], done=True), terminus(["ls"], done=True), 0.0, "similarity"),
        (terminus(["ls"]), terminus(["ls"], extra=1), 0.0, "schema"),
        (terminus(["ls"]), "[]", 0.0, "schema"),
        (terminus(["ls"]), terminus(["ls"])[:-1], 0.0, "not_json"),
        (terminus(["ls"]), "[" * 100_000, 0.0, "not_json"),
        ("ls", terminus(["ls"]), None, "demonstration_not_json"),
        ("{}", terminus(["ls"]), None, "demonstration_schema"),
    ],
)
def test_terminus_judge(expected, actual, reward, reason):
    verdict = TerminusJudge({}).verify(turn(act(text=expected)), act(text=actual))
    assert (verdict.reward, verdict.reason) == (reward, reason)


def test_terminus_1_shape():
    row = {
        "state_analysis": "",
        "explanation": "",
        "commands": [{"keystrokes": "ls", "is_blocking": True, "timeout_sec": 1}],
        "is_task_complete": False,
    }
    verifier = TerminusJudge({"harness": "terminus_1"})
    assert score(verifier, act(text=json.dumps(row)), act(text=json.dumps(row))) == 1.0
    del row["is_task_complete"]
    assert verifier.verify(turn(act(text=json.dumps(row))), act()).reward is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SingleStepToolUse, {"word_count_similarity_threshold": 2}),
        (SingleStepToolUse, {"parallel_tool_call_reward_mode": "mean"}),
        (SwePivot, {"reward_mode": "soft"}),
        (SwePivot, {"similarity_threshold": 0.9}),
        (TerminusJudge, {"harness": "terminus_3"}),
        (TerminusJudge, {"treshold": 0.9}),
    ],
)
def test_bad_options(kind, options):
    with pytest.raises(UserError, match=kind.name):
        kind(options)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["bash", "grep", "str_replace_editor", "f"])
KEYS = st.sampled_from(["command", "path", "view_range", "new_str", "old_str", "x"])
ACTIONS = st.builds(
    lambda text, calls: act(*(call(n, **a) for n, a in calls), text=text),
    st.text(max_size=30),
    st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON, max_size=3)), max_size=3),
)


@given(ACTIONS, ACTIONS)
def test_total(demonstration, action):
    for verifier in (SingleStepToolUse({}), SwePivot({"reward_mode": "continuous"}), TerminusJudge({})):
        reward = verifier.verify(turn(demonstration), action).reward
        assert reward is None or 0 <= reward <= 1
