from __future__ import annotations

import re

import pytest

from pivotrl.errors import UserError
from pivotrl.profiling.fingerprint import differences, fingerprint, require_same


def record(**changes):
    parts = {
        "weights": "w1",
        "template": "t1",
        "sampling": {"temperature": 1.0},
        "verifier": ("tool_calls", "1", {"text": "facts"}),
        "turns": [{"id": "a#0"}],
    }
    return fingerprint(**(parts | changes))


def test_equal_parts_give_equal_records():
    assert record() == record()
    assert require_same(record(), record(), allow_foreign=False) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"weights": "w2"}, "weights"),
        ({"template": "t2"}, "template"),
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature: profile 1.0, now 0.7"),
        ({"verifier": ("tool_calls", "2", {"text": "facts"})}, "verifier.version: profile 1, now 2"),
        ({"verifier": ("tool_calls", "1", {"text": "exclude"})}, "verifier.config.text: profile facts"),
        ({"verifier": ("tool_calls", "1", {})}, "verifier.config: profile (absent), now {}"),
        ({"turns": [{"id": "b#0"}]}, "turns"),
    ],
)
def test_each_part_is_told_apart_and_refused(change, key):
    found = differences(record(), record(**change))
    assert any(line.startswith(key) for line in found)
    assert {line.split(":")[0].split(".")[0] for line in found} == {key.split(":")[0].split(".")[0]}
    with pytest.raises(UserError, match=rf"(?s){re.escape(key)}.*allow_foreign_profile"):
        require_same(record(), record(**change), allow_foreign=False)
    assert require_same(record(), record(**change), allow_foreign=True) == found
