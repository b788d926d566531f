"""Files of unrelated questions: what kind each one is, told from the fields of its rows. Pure Python."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.evaluation.instructions import CHECKS, follows


@dataclass(frozen=True)
class MultipleChoice:
    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class ExactAnswer:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Instructions:
    prompt: str
    checks: tuple[tuple[str, Mapping[str, Any]], ...]


Question = MultipleChoice | ExactAnswer | Instructions


@dataclass(frozen=True)
class QuestionSet:
    name: str
    kind: str  # "choice" | "exact" | "instructions"
    rows: list[Question]
    left_out: int = 0  # rows with an instruction that no program can check


_KINDS: dict[str, tuple[str, ...]] = {
    "choice": ("ctx", "endings", "label"),
    "instructions": ("prompt", "instruction_id_list", "kwargs"),
    "exact": ("question", "answer"),
    "exact_target": ("input", "target"),
}


def find_sets(path: str) -> list[Path]:
    """The files that `evaluate.ood_path` means: a file, the *.jsonl of a folder, or a glob. Raises UserError."""
    place = Path(path)
    if place.is_file():
        return [place]
    found = sorted(place.glob("*.jsonl")) if place.is_dir() else sorted(Path(name) for name in glob.glob(path))
    if not found:
        raise UserError(f"evaluate.ood_path={path} does not exist; give a JSONL file of questions, a folder or a glob")
    return found


def read_sets(path: str, limit: int) -> list[QuestionSet]:
    """The first `limit` rows of every file. In a folder, files of no known kind are left out, and that is printed."""
    sets = []
    for file in find_sets(path):
        if not Path(path).is_file() and _kind_of_file(file) is None:
            print(f"evaluate: {file} is left out: its rows are no questions that can be scored here")
            continue
        sets.append(read_set(file, limit))
    if not sets:
        raise UserError(f"evaluate.ood_path={path}: no file of questions that can be scored")
    return sets


def read_set(path: Path, limit: int) -> QuestionSet:
    """The first `limit` rows. Raises UserError naming file and line of a bad row."""
    if not path.is_file():
        raise UserError(f"evaluate.ood_path={path} does not exist; give a JSONL file of questions, a folder or a glob")
    rows: list[Question] = []
    kind, left_out = "", 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(rows) == limit:
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: no JSON ({error})") from error
            kind = kind or _kind(row) or ""
            question = _question(row, kind, f"{path}:{number}")
            if question is None:
                left_out += 1
            else:
                rows.append(question)
    if not rows:
        raise UserError(f"evaluate.ood_path={path} has no row")
    return QuestionSet(path.stem, kind.partition("_")[0], rows, left_out)


def _kind(row: Any) -> str | None:
    return next((k for k, keys in _KINDS.items() if isinstance(row, dict) and all(key in row for key in keys)), None)


def _kind_of_file(path: Path) -> str | None:
    with path.open(encoding="utf-8") as file:
        try:
            return _kind(json.loads(file.readline() or "null"))
        except ValueError:
            return None


def _question(row: Any, kind: str, where: str) -> Question | None:
    try:
        if kind == "choice":
            return _choice(row, where)
        if kind == "instructions":
            return _instructions(row)
        if kind == "exact":
            return ExactAnswer(str(row["question"]), str(row["answer"]).rpartition("####")[2].strip())
        if kind == "exact_target":
            return ExactAnswer(str(row["input"]), str(row["target"]).strip())
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: not a row like those before it, or with a wrong value ({error!r})") from error
    known = "; ".join(", ".join(keys) for keys in _KINDS.values())
    raise UserError(f"{where}: not a multiple-choice row nor another question; expected the fields {known}")


def _choice(row: Mapping[str, Any], where: str) -> MultipleChoice:
    label, endings = int(row["label"]), tuple(str(e) for e in row["endings"])
    if not 0 <= label < len(endings):
        raise UserError(f"{where}: label {label} is not an index into {len(endings)} endings")
    context = f"{row['activity_label']}: {row['ctx']}" if row.get("activity_label") else str(row["ctx"])
    return MultipleChoice(context, endings, label)


def _instructions(row: Mapping[str, Any]) -> Instructions | None:
    checks = tuple(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    if any(name not in CHECKS for name, _ in checks):
        return None
    for name, arguments in checks:
        follows("probe", row["prompt"], name, arguments)  # a missing argument is the row's error, told now
    return Instructions(str(row["prompt"]), checks)


def answered(response: str, answer: str) -> bool:
    """Whether a free response gives the exact answer.

    A number: the last number of the response. A letter like (B): the last such letter. Else: the answer is the whole
    response, or what follows its last "answer is" or "answer:", without regard to case and a final stop.
    """
    if number := _number(answer):
        found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
        return bool(found) and _number(found[-1]) == number
    if re.fullmatch(r"\([A-Z]\)", answer):
        letters = re.findall(r"\(([A-Z])\)", response) or re.findall(r"\b([A-Z])\b", response)
        return bool(letters) and f"({letters[-1]})" == answer
    last = re.split(r"answer(?: is|:)", response.strip(), flags=re.IGNORECASE)[-1]
    return any(_bare(text) == _bare(answer) for text in (response, last))


def _number(text: str) -> str:
    """A canonical number, or an empty string."""
    plain = text.strip().replace(",", "").rstrip(".").removeprefix("$")
    if not re.fullmatch(r"-?\d+(?:\.\d+)?", plain):
        return ""
    return repr(float(plain))


def _bare(text: str) -> str:
    return " ".join(text.split()).strip(" .\"'*:").lower()


def kept(response: str, question: Instructions) -> tuple[int, int]:
    """(instructions that the response keeps, instructions of the question)."""
    found = [follows(response, question.prompt, name, arguments) for name, arguments in question.checks]
    return sum(bool(one) for one in found), len(found)
