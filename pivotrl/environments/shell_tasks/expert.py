"""The scripted expert: solves each family in several right ways, deciding from what the commands printed."""

from __future__ import annotations

import json
from random import Random

from pivotrl.environments.base import Task
from pivotrl.environments.shell_tasks.episode import ShellEpisode
from pivotrl.environments.shell_tasks.machine import Machine
from pivotrl.environments.shell_tasks.tasks import NAME, VERSION
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall

_MAX_TURNS = 8


class Expert:
    """Plays one episode. `run` varies the commands and the words."""

    def __init__(self, task: Task, run: int, machine: Machine) -> None:
        self.rng = Random(f"{NAME}/{VERSION}/expert/{task.id}/{run}")
        self.episode = ShellEpisode(task, _MAX_TURNS, machine)
        self.ask: JsonDict = task.spec["ask"]

    def play(self) -> ShellEpisode:
        getattr(self, f"_{self.ask['kind']}")()
        return self.episode

    def _bash(self, *options: str) -> str:
        """Run one of the options; returns what it printed."""
        self.episode.step(Action(tool_calls=(ToolCall("bash", {"command": self.rng.choice(options)}),)))
        return str(json.loads(self.episode.messages[-1]["content"])["out"])

    def _say(self, *options: str) -> None:
        self.episode.step(Action(text=self.rng.choice(options)))

    def _count_matches(self) -> None:
        path, word = self.ask["path"], self.ask["word"]
        count = self._bash(
            f"grep -c {word} {path}", f"grep {word} {path} | wc -l", f"cat {path} | grep -c {word}"
        ).strip()
        self._say(f"{count} lines contain {word}.", f"There are {count} {word} lines.", f"It has {count} of them.")

    def _find_file(self) -> None:
        directory, word = self.ask["directory"], self.ask["word"]
        found = self._bash(
            f"grep -rl {word} {directory}",
            f"grep -l {word} {directory}/*",
            f"find {directory} -type f | xargs grep -l {word}",
        ).strip()
        self._say(f"It is {found}.", f"{found} mentions {word}.", f"The file is {found}.")

    def _set_option(self) -> None:
        directory, option, new = self.ask["directory"], self.ask["option"], self.ask["new"]
        if self.rng.random() < 0.5:
            listed = self._bash(f"ls {directory}", f"ls {directory}/")
            path = next(f"{directory}/{name}" for name in listed.split() if name.endswith(".conf"))
        else:
            path = self._bash(f"ls {directory}/*.conf", f"find {directory} -name '*.conf'").strip()
        self._bash(f"sed -i 's/^{option}=.*/{option}={new}/' {path}", f"sed -i 's/{option}=.*/{option}={new}/' {path}")
        self._say(f"{option} is now {new}.", f"Done, {option}={new} in {path}.", f"I set {option} to {new}.")

    def _move_files(self) -> None:
        source, target, ending = self.ask["source"], self.ask["target"], self.ask["ending"]
        move = f"mv {source}/*.{ending} {target}/"
        if self.ask["exists"]:
            self._bash(move, f"mv {source}/*.{ending} {target}")
        elif self.rng.random() < 0.5:
            self._bash(f"mkdir {target} && {move}", f"mkdir -p {target}; {move}")
        else:
            self._bash(f"mkdir {target}", f"mkdir -p {target}")
            self._bash(move, f"mv {source}/*.{ending} {target}")
        self._say(
            f"The .{ending} files are in {target}/ now.", f"Done, they are in {target}.", "All of them are moved."
        )

    def _sort_unique(self) -> None:
        source, target = self.ask["source"], self.ask["target"]
        self._bash(f"sort -u {source} > {target}", f"sort {source} | uniq > {target}")
        self._say(f"{target} has the sorted names.", f"Done, see {target}.", f"I wrote {target}.")

    def _follow_pointer(self) -> None:
        pointer = self.ask["pointer"]
        path = self._bash(f"cat {pointer}", f"head {pointer}").strip()
        count = self._bash(f"wc -l < {path}", f"cat {path} | wc -l", f"grep -c '' {path}").strip()
        self._say(f"It has {count} lines.", f"{count} lines.", f"The file has {count} lines.")

    def _delete_empty(self) -> None:
        directory = self.ask["directory"]
        self._bash(
            f"find {directory} -type f -empty -delete",
            f"find {directory} -empty -type f -delete",
            f"find {directory} -type f -size 0 -delete",
        )
        self._say("The empty files are gone.", f"Done, {directory}/ has no empty file now.", "I deleted them.")
