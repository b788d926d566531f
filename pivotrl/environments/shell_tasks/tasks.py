"""Procedural tasks at a shell. A task's spec is self-contained JSON:

    files        path (relative to the working directory) -> content; a path that ends in "/" is an empty directory
    instruction  what the user asks for
    ask          what the expert needs to know of it: {"kind": family, ...}
    goal         path -> content of the right final state
    answer       the word or number that the last message must tell, or null

Train and test draw the names of files, people and words from disjoint sets.
"""

from __future__ import annotations

from random import Random
from typing import Any

from pivotrl.environments.procedural import TaskMaker
from pivotrl.trajectories.schema import JsonDict

NAME = "shell_tasks"
VERSION = "1"
FAMILIES = (
    "count_matches",
    "find_file",
    "set_option",
    "move_files",
    "sort_unique",
    "follow_pointer",
    "delete_empty",
)

_STEMS = {
    "train": ("web", "mail", "disk", "auth", "cache", "queue", "proxy", "store", "relay", "timer", "parse", "audit"),
    "test": ("batch", "login", "index", "route", "stock", "print", "video", "sound"),
}
_DIRECTORIES = {
    "train": ("logs", "notes", "docs", "inbox", "data", "etc", "work", "parts"),
    "test": ("files", "papers", "items", "input", "conf"),
}
_WORDS = {
    "train": ("maple", "river", "stone", "cloud", "amber", "tiger", "lemon", "piano", "candle", "harbor"),
    "test": ("velvet", "marble", "rocket", "garden", "copper", "window"),
}
_PEOPLE = {
    "train": ("dana", "omar", "lena", "ivan", "rosa", "hugo", "mina", "paul", "vera", "carl", "nora", "alan"),
    "test": ("emma", "luis", "sara", "adam", "tina", "mark", "julia", "peter"),
}
_LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")
_OPTIONS = ("port", "limit", "timeout", "workers")


class _Maker:
    """One method a family; each returns files, instruction, ask, goal and, where there is one, the answer."""

    def __init__(self, rng: Random, split: str) -> None:
        self.rng = rng
        self.stems, self.words = list(_STEMS[split]), list(_WORDS[split])
        self.people, self.directories = list(_PEOPLE[split]), list(_DIRECTORIES[split])
        for pool in (self.stems, self.words, self.people, self.directories):
            rng.shuffle(pool)

    def count_matches(self) -> JsonDict:
        path = f"{self.directories[0]}/{self.stems[0]}.log"
        level = self.rng.choice(_LEVELS)
        count = self.rng.randint(2, 7)
        rest = [self.rng.choice([one for one in _LEVELS if one != level]) for _ in range(self.rng.randint(2, 6))]
        levels = [level] * count + rest
        self.rng.shuffle(levels)
        lines = [f"{one} {self.rng.choice(self.words)} {self.rng.choice(self.stems[1:])}" for one in levels]
        files = {path: _text(lines)}
        instruction = self._say(
            f"How many lines of {path} contain {level}?",
            f"Count the {level} lines in {path}.",
            f"{path}: how many lines with {level} are there?",
        )
        return _question(files, instruction, {"path": path, "word": level}, str(count))

    def find_file(self) -> JsonDict:
        directory, word, *others = self.directories[0], *self.words
        names = [f"{directory}/{stem}.txt" for stem in self.stems[: self.rng.randint(3, 5)]]
        target = self.rng.choice(names)
        files = {}
        for name in names:
            lines = self.rng.sample(others, 3)
            if name == target:
                lines[self.rng.randrange(3)] = word
            files[name] = _text(lines)
        instruction = self._say(
            f"Which file in {directory}/ mentions {word}?",
            f"Find the file below {directory} that contains the word {word}.",
            f"One file of {directory}/ has {word} in it. Which one?",
        )
        return _question(files, instruction, {"directory": directory, "word": word}, target)

    def set_option(self) -> JsonDict:
        directory, path = self.directories[0], f"{self.directories[0]}/{self.stems[0]}.conf"
        option = self.rng.choice(_OPTIONS)
        values = {name: self.rng.randint(2, 99) * 10 for name in self.rng.sample(_OPTIONS, 3)}
        values[option] = self.rng.randint(2, 99) * 10
        new = self.rng.choice([v for v in range(20, 990, 10) if v != values[option]])
        files = {path: _text(f"{k}={v}" for k, v in values.items()), f"{directory}/{self.stems[1]}.txt": "read me\n"}
        goal = {**files, path: _text(f"{k}={new if k == option else v}" for k, v in values.items())}
        instruction = self._say(
            f"Set {option} to {new} in the .conf file of {directory}/.",
            f"The config file below {directory} should have {option}={new}. Change it.",
            f"Change {option} to {new} in the config in {directory}/.",
        )
        ask = {"directory": directory, "option": option, "new": str(new)}
        return {"files": files, "instruction": instruction, "ask": ask, "goal": goal}

    def move_files(self) -> JsonDict:
        source, target = self.directories[:2]
        ending = self.rng.choice(("tmp", "log", "csv"))
        keep = self.rng.choice([e for e in ("txt", "md", "json") if e != ending])
        moved = self.stems[: self.rng.randint(2, 3)]
        kept = self.stems[3 : self.rng.randint(4, 5)]
        files = {f"{source}/{stem}.{ending}": f"{self.rng.choice(self.words)}\n" for stem in moved}
        files |= {f"{source}/{stem}.{keep}": f"{self.rng.choice(self.words)}\n" for stem in kept}
        exists = self.rng.random() < 0.5
        if exists:
            files[f"{target}/"] = ""
        goal = {
            name.replace(f"{source}/", f"{target}/") if name.endswith(f".{ending}") else name: content
            for name, content in files.items()
            if name != f"{target}/"
        }
        where = f"{target}/" if exists else f"a new directory {target}/"
        instruction = self._say(
            f"Move all .{ending} files of {source}/ to {where}.",
            f"Put every .{ending} file from {source} into {where}.",
            f"The .{ending} files in {source}/ belong in {where}. Move them.",
        )
        ask = {"source": source, "target": target, "ending": ending, "exists": exists}
        return {"files": files, "instruction": instruction, "ask": ask, "goal": goal}

    def sort_unique(self) -> JsonDict:
        source, target = f"{self.stems[0]}.txt", f"{self.stems[1]}.txt"
        names = self.rng.sample(self.people, self.rng.randint(4, 6))
        lines = names + self.rng.sample(names, 2)
        self.rng.shuffle(lines)
        files = {source: _text(lines)}
        instruction = self._say(
            f"Write the names in {source} to {target}, sorted and each only once.",
            f"{target} should have the lines of {source} in order, without duplicates.",
            f"Sort {source}, drop duplicates, and save it as {target}.",
        )
        goal = {**files, target: _text(sorted(names))}
        return {"files": files, "instruction": instruction, "ask": {"source": source, "target": target}, "goal": goal}

    def follow_pointer(self) -> JsonDict:
        directory, pointer = self.directories[0], f"{self.stems[0]}.txt"
        names = [f"{directory}/{stem}.txt" for stem in self.stems[1:4]]
        target, lengths = self.rng.choice(names), self.rng.sample(range(2, 9), 3)
        files = {
            name: _text(self.rng.choice(self.words) for _ in range(length))
            for name, length in zip(names, lengths, strict=True)
        }
        files[pointer] = f"{target}\n"
        instruction = self._say(
            f"{pointer} names a file. How many lines does that file have?",
            f"Count the lines of the file that {pointer} points to.",
            f"How long, in lines, is the file named in {pointer}?",
        )
        return _question(files, instruction, {"pointer": pointer}, str(lengths[names.index(target)]))

    def delete_empty(self) -> JsonDict:
        directory = self.directories[0]
        stems = self.stems[: self.rng.randint(4, 5)]
        empty = set(self.rng.sample(stems, 2))
        files = {
            f"{directory}/{stem}.txt": "" if stem in empty else f"{self.rng.choice(self.words)}\n" for stem in stems
        }
        instruction = self._say(
            f"Delete the empty files in {directory}/.",
            f"Remove every file of {directory} that has no content.",
            f"Some files below {directory}/ are empty. Delete them.",
        )
        goal = {name: content for name, content in files.items() if content}
        return {"files": files, "instruction": instruction, "ask": {"directory": directory}, "goal": goal}

    def _say(self, *options: str) -> str:
        return self.rng.choice(options)


def _text(lines: Any) -> str:
    return "".join(f"{line}\n" for line in lines)


def _question(files: JsonDict, instruction: str, ask: JsonDict, answer: str) -> JsonDict:
    return {"files": files, "instruction": instruction, "ask": ask, "goal": files, "answer": answer}


def _spec(rng: Random, split: str, family: str) -> JsonDict:
    made = getattr(_Maker(rng, split), family)()
    ask = {"kind": family, **made.pop("ask")}
    return {"answer": None, **made, "ask": ask}


MAKER = TaskMaker(NAME, VERSION, FAMILIES, _spec)
