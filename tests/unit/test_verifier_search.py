from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_doubles import act, call, tool, turn

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.verifiers.queries import fold, parse_query, query_similarity, same_answer, same_query
from pivotrl.verifiers.search import Search, same_json
from pivotrl.verifiers.urls import normalise_url

STRINGS = {"type": "array", "items": {"type": "string"}}
SEARCH = tool("search", ["query"], query=STRINGS, page={"type": "integer", "default": 1})
VISIT = tool("visit", ["url", "goal"], url=STRINGS, goal={"type": "string"})
READ = tool("read", ["key"], key={"type": "string"}, ranges={"type": "array"}, section={"type": "string"})


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("2016 Summer Olympics medal table", "medal table  2016 summer OLYMPICS?", True),
        ("2016 olympics", "2012 olympics", False),
        ("the ghost ship", "ghost ship", True),
        ("the the", "the", False),
        ("cats dogs", "cats dogs dogs", False),
        ("“Iron Curtain” speech", 'speech "iron curtain"', True),
        ('"iron curtain" speech', "iron curtain speech", False),
        ('"iron curtain"', '"curtain iron"', False),
        ("site:SEC.gov aapl", "aapl site:sec.gov", True),
        ("site:sec.gov aapl", "aapl sec.gov", False),
        ("ext:pdf report", "report filetype:pdf", True),
        ("jaguar -car", "jaguar car", False),
        ("jaguar -car", "-car jaguar", True),
        ("cats OR dogs", "dogs | cats", True),
        ("cats OR dogs", "cats dogs", False),
        ("cats or dogs", "cats OR dogs", False),
        ("a OR b c OR d", "a OR d c OR b", False),
        ("gdp 2010..2015", "gdp 2010..2016", False),
        ("c++ tutorial", "c# tutorial", False),
        ("Lingolia - Esperanto", "Lingolia Esperanto", True),
        ('unbalanced "quote', "unbalanced quote", True),
        ("naïve", "naive", False),
    ],
)
def test_queries(one, two, same):
    assert same_query(one, two) is same
    assert same_query(two, one) is same


def test_query_order_and_similarity():
    assert not same_query("dog bites man", "man bites dog", ordered=True)
    assert query_similarity("ghost ship azores 1872", "ghost ship mystery 1872") == pytest.approx(6 / 8)
    assert query_similarity("ghost ship azores 1872", "ghost ship azores 1873") == 0.0
    assert query_similarity('"ghost ship" azores', "ghost ship azores") == 0.0
    assert query_similarity("ghost ship", "pirate gold") == 0.0


@given(st.text(), st.text())
def test_query_rules_are_total_symmetric_and_reflexive(one, two):
    assert same_query(one, one)
    assert parse_query(one) == parse_query(one)
    assert same_query(one, two) == same_query(two, one)
    assert query_similarity(one, two) == query_similarity(two, one)
    assert 0 <= query_similarity(one, two) <= 1


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("HTTPS://En.Wikipedia.org/wiki/X", "https://en.wikipedia.org/wiki/X", True),
        ("https://a.org/wiki/X", "https://a.org/wiki/x", False),
        ("https://a.org", "https://a.org/", True),
        ("https://a.org/x/", "https://a.org/x", True),
        ("https://a.org:443/x", "https://a.org/x", True),
        ("https://a.org:80/x", "https://a.org/x", False),
        ("http://a.org/x", "https://a.org/x", False),
        ("https://www.a.org/x", "https://a.org/x", False),
        ("https://a.org/x?utm_source=b&id=1&gclid=2", "https://a.org/x?id=1", True),
        ("https://a.org/x?id=1", "https://a.org/x?id=2", False),
        ("https://a.org/x?b=1&a=2", "https://a.org/x?a=2&b=1", True),
        ("https://a.org/x?a=1&a=2", "https://a.org/x?a=2&a=1", False),
        ("https://a.org/x?a=", "https://a.org/x?a", False),
        ("https://a.org/x?q=a+b", "https://a.org/x?q=a%20b", True),
        ("https://a.org/a+b", "https://a.org/a%20b", False),
        ("https://a.org/caf%c3%a9", "https://a.org/café", True),
        ("https://a.org/%7Eme", "https://a.org/~me", True),
        ("https://a.org/a%2Fb", "https://a.org/a/b", False),
        ("https://a.org/b/../c/./d", "https://a.org/c/d", True),
        ("https://a.org/x#history", "https://a.org/x", True),
        ("https://a.org/#/users", "https://a.org/#/orders", False),
        ("https://a.org/#!/users", "https://a.org/", False),
        ("https://user@a.org/", "https://a.org/", False),
        ("https://müller.de/", "https://xn--mller-kva.de", True),
        ("https://a.org.evil.com/", "https://a.org/", False),
        ("https://a.org@evil.com/", "https://a.org/", False),
        ("http://[::1", "http://[::1", True),
        ("a.org/x", "https://a.org/x", False),
    ],
)
def test_urls(one, two, same):
    assert (normalise_url(one) == normalise_url(two)) is same


def test_url_options():
    assert normalise_url("http://a.org/x", http_is_https=True) == normalise_url("https://a.org/x")
    assert normalise_url("https://a.org/x#h", fragment="exact") != normalise_url("https://a.org/x", fragment="exact")
    assert normalise_url("https://a.org/#/u", fragment="ignore") == normalise_url("https://a.org/")


@given(
    st.text()
    | st.from_regex(r"https?://[a-z]{1,5}\.org(:\d{1,5})?/[\w%./-]{0,12}(\?[\w%=&+]{0,12})?(#.{0,5})?", fullmatch=True)
)
def test_url_normalisation_is_total_and_idempotent(url):
    once = normalise_url(url)
    assert normalise_url(once) == once


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("The Mary Celeste", "mary celeste.", True),
        ("Four", "4", True),
        ("$115,877 million", "$115.877 billion", True),
        ("$115,877 million", "$115.9 billion", None),  # rounded
        ("$115,877 million", "$125 billion", False),
        ("51%", "51.00 percent", True),
        ("10 players", "10", None),
        ("10", "12", False),
        ("5 m", "5 million", None),
        ("Yes", "no", False),
        ("Yes.", "Yes", True),
        ("Paris", "London", None),  # may be two names of one thing: a judge's matter
        ("It was <answer>10</answer>.", "Reasoning.\nFinal answer: 10", True),
        ("\\boxed{7}", "seven", True),
        ("Paris", "", False),
        ("Paris", " ** ", False),
        ("42", "9" * 5000, False),
    ],
)
def test_answers(one, two, same):
    assert same_answer(one, two) is same


@given(st.text(), st.text())
def test_answers_are_total(one, two):
    assert same_answer(one, two) in (True, False, None)
    if fold(one):
        assert same_answer(one, one) is True


def score(demonstration, action, **options):
    verdict = Search(options).verify(turn(demonstration, SEARCH, VISIT, READ), action)
    return verdict.reward, verdict.reason


def query(*texts, **more):
    return act(call("search", query=list(texts), **more))


def visit(*urls, goal="Find the host."):
    return act(call("visit", url=list(urls), goal=goal))


@pytest.mark.parametrize(
    ("demonstration", "action", "reward", "reason"),
    [
        (query("a b", "c"), query("c", "B a"), 1.0, "match"),
        (query("a b", "c"), query("c"), 0.0, "argument_differs:query"),
        (query("a b"), query("a b", "c"), 0.0, "argument_differs:query"),  # no free surplus
        (query("a b"), query("a b", "a b"), 0.0, "argument_differs:query"),
        (query("a"), query(""), 0.0, "argument_differs:query"),
        (query("a"), act(call("search", query="a")), 0.0, "argument_differs:query"),
        (query("a"), query("a", page=1), 1.0, "match"),  # a default written out
        (query("a"), query("a", page=2), 0.0, "argument_differs:page"),
        (query("a"), query("a", page=True), 0.0, "argument_differs:page"),
        (query("a"), query("a", deep=1), 0.0, "extra_argument:deep"),
        (query("a"), act(call("search")), 0.0, "missing_argument:query"),
        (query("a"), act(call("find", query=["a"])), 0.0, "wrong_tool"),
        (query("a"), act(query("a").tool_calls[0], query("b").tool_calls[0]), 0.0, "number_of_calls"),
        (query("a"), act(text="the answer"), 0.0, "answer_for_call"),
        (query("a"), act(), 0.0, "empty"),
        (query("a"), act(query("a").tool_calls[0], problems=("unclosed",)), 0.0, "malformed"),
        (visit("https://a.org/x"), visit("https://A.org/x/"), 1.0, "match"),
        (visit("https://a.org/x"), visit("https://a.org/x", goal="Other words"), None, "argument_not_settled:goal"),
        (visit("https://a.org/x"), visit("https://a.org/y", goal="Other words"), 0.0, "argument_differs:url"),
        (visit("https://a.org/x"), visit("https://a.org/x", goal=""), 0.0, "argument_differs:goal"),
        (act(text="It is **Brazil**."), act(text="it is Brazil"), 1.0, "match"),
        (act(text="Brazil"), act(text="The host country"), None, "answer_not_settled"),
        (act(text="Brazil"), query("Brazil"), 0.0, "call_for_answer"),
        (act(text="Brazil"), act(), 0.0, "answer_differs"),
    ],
)
def test_actions(demonstration, action, reward, reason):
    assert score(demonstration, action) == (reward, reason)


def test_a_call_is_matched_as_a_multiset_with_open_questions():
    one, two = visit("https://a.org/x").tool_calls[0], visit("https://a.org/y").tool_calls[0]
    other = visit("https://a.org/y", goal="Else").tool_calls[0]
    assert score(act(one, two), act(two, one)) == (1.0, "match")
    assert score(act(one, two), act(other, one))[0] is None
    assert score(act(one, two), act(one, one))[0] == 0.0


def test_rules_by_option():
    demonstration = visit("https://a.org/x", goal="Find the host country of 2016")
    near = visit("https://a.org/x", goal="Find the host country in 2016")
    for rule, reward in (("similarity", 1.0), ("exact", 0.0), ("ignore", 1.0), ("unscorable", None)):
        assert score(demonstration, near, text_rule=rule)[0] == reward
    wrong_year = visit("https://a.org/x", goal="Find the host country of 2012")
    assert score(demonstration, wrong_year, text_rule="similarity")[0] == 0.0
    assert score(query("ghost ship azores"), query("ghost ship atlantic"))[0] == 0.0
    assert score(query("ghost ship azores"), query("ghost ship atlantic"), query_rule="similarity")[0] == 1.0
    assert score(query("dog man"), query("man dog"), query_rule="ordered")[0] == 0.0
    zero = {"query_rule": "similarity", "query_threshold": 0.0}
    assert score(query("a"), query("b"), **zero)[0] == 0.0  # a threshold of 0 does not accept everything
    assert score(query("a", page=1), query("a", page=9), roles={"search": {"page": "ignore"}})[0] == 1.0


def test_reads_by_what_they_cover():
    def read(*spans, key="d", **more):
        rows = [{"key": key, "start": a, "end": b} for a, b in spans]
        return act(call("read", key="k", ranges=rows, **more))

    assert score(read((0, 10), (10, 20)), read((0, 20)))[0] == 1.0
    assert score(read((0, 20)), read((0, 20), (5, 9)))[0] == 0.0  # more reading
    assert score(read((0, 20)), read((0, 20), (0, 20)))[0] == 0.0
    assert score(read((0, 20)), read((0, 19)))[0] == 0.0
    assert score(read((0, 20)), read((0, 19)), range_overlap=0.9)[0] == 1.0
    assert score(read((0, 20)), read((0, 10**9)), range_overlap=0.9)[0] == 0.0
    assert score(read((0, 20)), read((0, 20), key="e"))[0] == 0.0
    assert score(read((0, 20)), act(call("read", key="k", ranges="all")))[0] == 0.0
    assert score(read((0, 2), section="See Also"), read((0, 2), section="see  also"))[0] == 1.0


def test_same_json():
    number = {"type": "number"}
    assert same_json(1, 1.0, number)
    assert not same_json(1, 1.0, {"type": "integer"})
    assert not same_json(1, True, number)
    assert not same_json("1", 1, number)
    assert not same_json([1, 2], [2, 1])
    assert same_json({"a": [1.0], "b": 2}, {"b": 2, "a": [1]}, {"properties": {"a": {"items": number}}})


@pytest.mark.parametrize(
    "options",
    [{"query_rule": "fuzzy"}, {"roles": {"search": {"query": "quary"}}}, {"text_threshold": 7}, {"rolls": {}}],
)
def test_bad_options(options):
    with pytest.raises(UserError, match="search"):
        Search(options)


def shared_turns():
    folder = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data" / "search"
    for name in ("webdancer_chat.jsonl", "finance_sec_chat.jsonl"):
        if not (folder / name).exists():
            pytest.skip(f"no shared data at {folder}")
        for line in (folder / name).read_bytes().split(b"\n"):
            row = json.loads(line) if line else {"messages": []}
            for i, message in enumerate(row["messages"]):
                if message["role"] == "assistant":
                    functions = [c["function"] for c in message.get("tool_calls") or ()]
                    calls = tuple(ToolCall(f["name"], json.loads(f["arguments"])) for f in functions)
                    action = Action(text=message.get("content") or "", tool_calls=calls)
                    yield turn(action, *row["tools"], id=f"{row['id']}#{i}")


def test_every_shared_demonstration_matches_itself_and_no_other():
    turns = list(shared_turns())
    assert len(turns) > 50
    verifier = Search({})
    for t in turns:
        assert verifier.verify(t, t.demonstration).reward == 1.0, t.id
        assert verifier.verify(t, Action()).reward == 0.0
    for one in turns:
        for two in turns:
            if verifier.verify(one, two.demonstration).reward == 1.0:
                assert json.dumps(one.demonstration.to_json()) == json.dumps(two.demonstration.to_json())
