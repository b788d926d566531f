from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_doubles import act, call, tool, turn

from pivotrl.errors import UserError
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.composition import All, First, Weighted
from pivotrl.verifiers.similarity import Similarity

TURN = turn(act(call("f", x=1)))
REWARDS = st.lists(st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=5)


class Says:
    version = "1"

    def __init__(self, name, options):
        self.name, self.reward, self.asked = name, options.get("reward"), 0

    def config(self):
        return {"reward": self.reward}

    def verify(self, turn, action):
        self.asked += 1
        if self.reward == "raise":
            raise RuntimeError
        return Verdict(self.reward, f"said_{self.name}", {"counts": {"calls": 1}})


def members(*rewards, **extra):
    return {"members": [{"name": f"m{i}", "options": {"reward": r}} for i, r in enumerate(rewards)], **extra}


@pytest.mark.parametrize(
    ("kind", "options", "reward", "reason", "asked"),
    [
        (First, members(None, 0.0, 1.0), 0.0, "said_m1", 2),
        (First, members("raise", 1.0), 1.0, "said_m1", 2),
        (First, members(None, None), None, "said_m1", 2),
        (First, members(0.0, 1.0, 0.0, settles="accepted"), 1.0, "said_m1", 2),
        (First, members(0.0, None, settles="accepted"), None, "said_m1", 2),
        (First, members(0.2, 0.5, 0.1, settles="accepted"), 0.5, "said_m1", 3),
        (All, members(1.0, 0.4, 1.0), 0.4, "said_m1", 3),
        (All, members(None, 0.0, 1.0), 0.0, "said_m1", 2),
        (All, members(1.0, None, 0.5), None, "said_m1", 3),
        (All, members(1.0, 7.0), None, "invalid_reward", 2),
        (Weighted, members(1.0, 0.0), 0.5, "weighted", 2),
        (Weighted, members(1.0, None), None, "said_m1", 2),
    ],
)
def test_rules(kind, options, reward, reason, asked):
    verifier = kind(options, Says)
    verdict = verifier.verify(TURN, act(call("f", x=1)))
    assert (verdict.reward, verdict.reason) == (reward, reason)
    assert sum(m.asked for m in verifier.members) == asked
    assert verdict.details.get("counts", {}).get("calls", 0) <= asked


@given(REWARDS)
def test_bounds_and_unscorable(rewards):
    for kind in (First, All, Weighted):
        verdict = kind(members(*rewards), Says).verify(TURN, act())
        known = [r for r in rewards if r is not None]
        if verdict.reward is None:
            assert None in rewards
            continue
        assert min(known) - 1e-12 <= verdict.reward <= max(known) + 1e-12
        if kind is Weighted:
            assert None not in rewards
            assert math.isclose(verdict.reward, sum(known) / len(known), abs_tol=1e-12)
        if kind is All and None in rewards:
            assert verdict.reward == 0.0


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        (First, {}, "empty"),
        (First, {"member": []}, "members"),
        (First, members(1.0, settles="first"), "accepted"),
        (All, {"members": [{"options": {}}]}, r"members\[0\]"),
        (All, {"members": [{"name": "x", "weight": 1}]}, "weight"),
        (Weighted, {"members": [{"name": "x", "weight": True}]}, "above 0"),
        (Weighted, {"members": [{"name": "x", "weight": math.nan}]}, "above 0"),
    ],
)
def test_bad_options(kind, options, word):
    with pytest.raises(UserError, match=word):
        kind(options, Says)


def test_members_enter_the_config():
    one, two = (Weighted(members(1.0, r), Says).config() for r in (0.0, 1.0))
    assert one != two
    assert one["members"][1] == {"name": "m1", "version": "1", "config": {"reward": 0.0}}


def test_similarity_is_the_srl_ratio():
    verifier = Similarity({})
    demonstration = act(call("bash", command="abcd"))
    t = turn(demonstration)
    assert verifier.verify(t, demonstration).reward == 1.0
    assert verifier.verify(t, act(call("bash", command="abcd"), thinking="so")).reward == 1.0
    size = len('bash {"command":"abcd"}')
    assert verifier.verify(t, act(call("bash", command="ab"))).reward == pytest.approx(2 * (size - 2) / (2 * size - 2))
    assert verifier.verify(t, act()).reward == 0.0
    assert verifier.verify(t, act(call("bash", command="abcd"), problems=("unclosed",))).reward == 0.0
    assert verifier.verify(t, act(text="x" * 30_000)).reward is None
    assert verifier.verify(turn(act(call("f", a=1, b=2))), act(call("f", b=2, a=1))).reward == 1.0


@given(st.text(max_size=200), st.text(max_size=200))
def test_similarity_is_total_and_bounded(a, b):
    verdict = Similarity({}).verify(turn(act(text=a)), act(text=b))
    assert verdict.reward is not None
    assert 0 <= verdict.reward <= 1
    assert (verdict.reward == 1.0) == (a.strip() == b.strip() != "")


def test_members_come_from_the_registry():
    verifier = First({"members": [{"name": "tool_calls"}, {"name": "strict"}]})
    t = turn(act(call("f", x=1)), tool("f", ["x"], x={"type": "integer"}))
    assert verifier.verify(t, t.demonstration).reward == 1.0
    assert verifier.verify(t, act(call("f", x=2))).reward == 0.0
    with pytest.raises(UserError, match="unknown"):
        First({"members": [{"name": "tool_cals"}]})
