"""Unrelated questions: files of every kind, and what counts as a right answer or a kept instruction."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.errors import UserError
from pivotrl.evaluation.instructions import CHECKS, follows
from pivotrl.evaluation.out_of_domain import evaluate_choices, evaluate_set, joined
from pivotrl.evaluation.questions import ExactAnswer, MultipleChoice, answered, read_set, read_sets
from pivotrl.generation.engine import Completion

SHARED = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data" / "ood"
CHOICE = {"ctx": "a", "endings": ["b", "c"], "label": 1}
EXACT = {"question": "How many?", "answer": "2 and 2 are 4. #### 1,204"}
FOLLOW = {"prompt": "No comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class Letters:
    """Stands for renderer and engine: a text's ids are its characters; answers come from a script."""

    def __init__(self, answers: dict[str, str] | None = None, thinking_open: bool = False) -> None:
        self.answers, self.thinking_open = answers or {}, thinking_open

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        return self.encode(messages[-1]["content"])

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def whole_text(self, ids: list[int]) -> str:
        return f"<think>\n{self.decode(ids)}" if self.thinking_open else self.decode(ids)

    def score(self, prompts: Any, continuations: Any) -> list[list[float]]:
        return [[-1.0 if chr(i) == "x" else -2.0 for i in ids] for ids in continuations]

    def generate(self, prompts: Any, sampling: Any, n: int, seeds: Any) -> list[list[Completion]]:
        assert sampling.temperature == 0.0
        texts = [self.answers.get(self.decode(p), "") for p in prompts]
        return [[Completion(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)] for text in texts]


def test_choices_are_compared_per_character():
    rows = [MultipleChoice("c", ("xxxxxxxx", "ab"), 0), MultipleChoice("c", ("ab", "xxxxxxxx"), 0)]
    found = evaluate_choices(rows, Letters(), Letters(), "letters")  # type: ignore[arg-type]
    assert (found["accuracy"], found["n"], found["per_task"]) == (0.5, 2, {"0": 1.0, "1": 0.0})


def test_sets_of_all_kinds_and_their_mean(tmp_path: Path):
    write(tmp_path / "a.jsonl", CHOICE)
    write(tmp_path / "b.jsonl", EXACT, {**EXACT, "question": "x" * 99})
    unchecked = {**FOLLOW, "instruction_id_list": ["language:response_language"]}
    write(tmp_path / "c.jsonl", unchecked, FOLLOW)
    sets = read_sets(str(tmp_path), 10)
    assert [(s.name, s.kind, len(s.rows), s.left_out) for s in sets] == [
        ("a", "choice", 1, 0),
        ("b", "exact", 2, 0),
        ("c", "instructions", 1, 1),
    ]
    engine = Letters({"How many?": "It is 1204.", "No comma.": "Fine"})
    each = {s.name: evaluate_set(s, engine, engine, 10, 60) for s in sets}  # type: ignore[arg-type]
    found = joined(each)
    assert found["sets"]["b"]["left_out"] == 1  # beyond the context: neither right nor wrong
    assert found["sets"]["c"]["instructions_followed"] == 1.0
    assert (found["n"], found["accuracy"]) == (3, pytest.approx(2 / 3))
    assert set(found["per_task"]) == {"a/0", "b/0", "c/0"}
    alone = joined({"b": each["b"]})
    assert (alone["name"], alone["accuracy"]) == ("b", 1.0)


@pytest.mark.parametrize(
    ("thinking_open", "text", "right"),
    [
        (True, "Is it 1204?", 0.0),  # cut in its thinking: no answer yet
        (True, "Is it 7? No.</think>1204", 1.0),
        (True, "1204, surely</think>7", 0.0),
        (False, "<think>Is it 1204?", 0.0),
        (False, "<think>Is it 7?</think>1204", 1.0),
        (False, "1204", 1.0),
    ],
)
def test_only_what_follows_the_thinking_is_an_answer(tmp_path: Path, thinking_open: bool, text: str, right: float):
    (questions,) = read_sets(str(write(tmp_path / "b.jsonl", EXACT)), 1)
    engine = Letters({"How many?": text}, thinking_open)
    assert evaluate_set(questions, engine, engine, 40, 80)["accuracy"] == right  # type: ignore[arg-type]


def test_a_folder_leaves_out_files_of_other_rows_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "code.jsonl", {"task_id": 1, "test": "assert"})
    with pytest.raises(UserError, match="no file of questions"):
        read_sets(str(tmp_path), 5)
    write(tmp_path / "a.jsonl", CHOICE)
    assert [s.name for s in read_sets(str(tmp_path / "*.jsonl"), 5)] == ["a"]
    assert "code.jsonl is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "line", "message"),
    [
        (CHOICE, "nope", r":2: no JSON"),
        (CHOICE, {"ctx": "a", "endings": ["b"]}, r":2: not a row like.*label"),
        (CHOICE, {"ctx": "a", "endings": ["b"], "label": 3}, r":2: label 3 is not an index"),
        (EXACT, {"question": "x"}, r":2: not a row like"),
        (FOLLOW, {**FOLLOW, "kwargs": []}, r":2: not a row like"),
        (FOLLOW, {**FOLLOW, "instruction_id_list": ["keywords:existence"]}, r":2: .*keywords"),
        ({"a": 1}, CHOICE, r":1: not a multiple-choice row"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, first: Any, line: Any, message: str):
    path = write(tmp_path / "rows.jsonl", first, line)
    with pytest.raises(UserError, match=message):
        read_set(path, 9)


def test_missing_and_empty_files(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        read_sets(str(tmp_path / "none.jsonl"), 1)
    with pytest.raises(UserError, match="has no row"):
        read_set(write(tmp_path / "empty.jsonl"), 1)


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("She makes $1,204 a day.", "1204", True),
        ("12 plus 6 is 18", "18", True),
        ("18 is the sum of 12 and 6", "18", False),
        ("3.50", "3.5", True),
        ("no idea", "18", False),
        ("The answer is (B).", "(B)", True),
        ("B", "(B)", True),
        ("Not (A) but (C)", "(A)", False),
        ("No.", "No", True),
        ("I think that the answer is: no", "No", True),
        ("No, it does", "No", False),
        ("apple pear", "apple pear", True),
        ("", "No", False),
    ],
)
def test_exact_answers(response: str, answer: str, right: bool):
    assert answered(response, answer) is right


KEPT: list[tuple[str, dict[str, Any], str, str]] = [  # instruction, arguments, a text that keeps it, one that does not
    ("punctuation:no_comma", {}, "One and two.", "One, two."),
    ("change_case:english_lowercase", {}, "all small.", "Not small."),
    ("change_case:english_capital", {}, "ALL LARGE.", "Not LARGE."),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "A BIG cat",
        "a B",
    ),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "two words", "three words now"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "don't stop now", "two words"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "One. Two!", "One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First it is.\n\nThen not.",
        "Then it is.\n\nFirst not.",
    ),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:title", {}, "<<My title>>\ntext", "<My title>"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1 a SECTION b",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. P.S. more", "Bye."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "The Cat and the dog", "category dog"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat"),
    ("keywords:frequency", {"relation": "at least", "keyword": "so", "frequency": 2}, "So so", "so sober"),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "e", "let_frequency": 2}, "Ex", "Eve"),
    ("startend:end_checker", {"end_phrase": "The end."}, "It is. the end.", "The end. Or not."),
    ("startend:quotation", {}, '"quoted"', '"quoted'),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Do it."}, "Do it. Done.", "Done. Do it."),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
]


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), KEPT)
def test_instructions(instruction: str, arguments: dict[str, Any], good: str, bad: str):
    assert follows(good, "", instruction, arguments) is True
    assert follows(bad, "", instruction, arguments) is False
    assert follows(" \n", "", instruction, arguments) is False


def test_every_check_has_a_case_and_unknown_ones_have_no_verdict():
    assert set(CHECKS) - {case[0] for case in KEPT} == {"detectable_format:constrained_response"}
    assert follows("x", "", "language:response_language", {"language": "fa"}) is None


@given(st.text(max_size=60), st.sampled_from(KEPT))
def test_checks_are_total(text: str, case: tuple[str, dict[str, Any], str, str]):
    assert follows(text, "", case[0], case[1]) in (True, False)


@pytest.mark.skipif(not SHARED.is_dir(), reason="shared data is absent")
def test_the_shared_sets_are_read():
    sets = {s.name: s for s in read_sets(str(SHARED), 50)}
    assert {name: s.kind for name, s in sets.items()} == {
        "bbh_8x25": "exact",
        "gsm8k_test_200": "exact",
        "hellaswag_val_200": "choice",
        "ifeval_200": "instructions",
    }
    assert all(len(s.rows) == 50 for s in sets.values())
    numbers = [row.answer for row in sets["gsm8k_test_200"].rows if isinstance(row, ExactAnswer)]
    assert all(answered(f"So it is {n}.", n) for n in numbers)
