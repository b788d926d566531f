"""An environment for runs of random models: what they write is noise, so success is the parity of its length."""

from __future__ import annotations

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.outfitters import Outfitters
from pivotrl.environments.outfitters.episode import OutfittersEpisode


class ParityEpisode(OutfittersEpisode):
    def outcome(self) -> Outcome:
        written = sum(len(str(m.get("content"))) for m in self.messages if m["role"] == "assistant")
        return Outcome(written % 2 == 0, "even" if written % 2 == 0 else "odd")


class ParityWorld(Outfitters):
    """The tasks and tools of outfitters, with mixed outcomes from the first episode on."""

    def reset(self, task: Task, max_turns: int) -> OutfittersEpisode:
        return ParityEpisode(task, max_turns)
