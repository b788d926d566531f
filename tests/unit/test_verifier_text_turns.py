"""The option `text` of every domain, through `pivotrl verify`: excluded, by similarity, by facts, or by the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verifier_doubles import act, turn

from pivotrl import cli
from pivotrl.config import VerifierConfig
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.verifiers import judge as judge_module
from pivotrl.verifiers import sandbox
from pivotrl.verifiers.judge_client import Answer
from pivotrl.verifiers.registry import get_verifier

DOMAINS = ("conversational", "tau2", "terminal", "swe", "search", "outfitters", "shell_tasks")
SAID = "Your order W12 was cancelled and the refund of $50 is on the way."
COMPLETIONS = [
    SAID,
    "Your order W12 was cancelled and a refund of $50 is on the way.",
    "I have cancelled order W12; $50 come back to you.",
    "Anything at all.",
    "Your order W12 was not cancelled and the refund of $50 is on the way.",
    "",
    '<tool_call>{"name": "cancel", "arguments": {}}</tool_call>',
]
WANTED = {
    "exclude": [None, None, None, None, None, 0, 0],
    "same": [1, None, None, None, None, 0, 0],
    "similarity:0.8": [1, 1, 0, 0, 0, 0, 0],
    "facts": [1, 1, 1, 0, None, 0, 0],
    "judge": [1, 1, 1, 0, 0, 0, 0],
}
_ENDPOINT = "{base_url: 'http://127.0.0.1:9/v1', model: m}"


class Client:
    """Calls equivalent whatever says "W12" and not "not"."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def ask(self, body: dict[str, Any]) -> Answer:
        second = body["messages"][1]["content"].split("ACTION B\n")[1]
        verdict = "equivalent" if "W12" in second and " not " not in second else "different"
        return Answer(json.dumps({"analysis": "", "verdict": verdict}), "stop", 10, 2, 1)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "ChatClient", Client)
    if sandbox.unusable():  # shell_tasks opens only where one works; texts run nothing
        monkeypatch.setattr(sandbox, "unusable", lambda: None)


def verify(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> list[Any]:
    (folder / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["verify", "--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    assert cli.main([*arguments, *overrides]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def rows(**more: Any) -> list[dict[str, Any]]:
    return [{"expected": {"role": "assistant", "content": SAID}, "completion": text, **more} for text in COMPLETIONS]


@pytest.mark.parametrize("rule", WANTED)
@pytest.mark.parametrize("domain", DOMAINS)
def test_each_rule_in_each_domain(tmp_path: Path, domain: str, rule: str) -> None:
    overrides = [f"domain={domain}", f"domain.verifier.options.text={rule}"]
    if rule == "judge":
        overrides.append(f"domain.verifier.options.judge={_ENDPOINT}")
    found = verify(tmp_path, rows(), *overrides)
    assert [row["reward"] for row in found] == WANTED[rule], found


def test_no_domain_pays_any_text_by_itself(tmp_path: Path) -> None:
    out = verify(tmp_path, [row for domain in DOMAINS for row in rows(domain=domain)])
    for i, domain in enumerate(DOMAINS):
        rewards = [row["reward"] for row in out[i * len(COMPLETIONS) : (i + 1) * len(COMPLETIONS)]]
        assert rewards[0] in (1, None) and set(rewards[1:]) <= {0, None}, (domain, rewards)
        assert rewards[-2:] == [0, 0] or domain in ("outfitters", "shell_tasks"), (
            domain,
            rewards,
        )  # no state to run in


@pytest.mark.parametrize("domain", DOMAINS)
def test_wrong_rules_are_refused(domain: str) -> None:
    settings = load_config([f"domain={domain}"]).domain.verifier
    for text, word in (
        ("judge", "judge is missing"),
        ("similar", "use "),
        ("similarity:2", "0 < x <= 1"),
        ("1", "use "),
    ):
        settings.options["text"] = text
        with pytest.raises(UserError, match=word):
            get_verifier(settings)


def test_the_judge_after_the_same_words() -> None:
    """`judge` with the default `text: same`: it is asked about other words; `exclude` asks nobody."""
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    one = turn(act(text=SAID))
    for name in ("shell", "edits"):
        both = [get_verifier(VerifierConfig(name, {"judge": endpoint, "text": t})) for t in ("same", "exclude")]
        assert [v.verify(one, act(text=COMPLETIONS[2])).reward for v in both] == [1, None]
