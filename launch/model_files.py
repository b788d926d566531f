"""Preflight of what a model's folder and the turns file hold: tokenizer, template, lengths. No torch is loaded."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.config import Config
from pivotrl.errors import UserError

if TYPE_CHECKING:
    from pivotrl.rendering.chat import Renderer

_SAMPLES = 4  # longest and shortest turns that are rendered with the real tokenizer
_TURNS_READ = 200_000


def importable(module: str) -> bool:
    """Whether a package is installed here: a login node may have the core alone."""
    return find_spec(module) is not None


def raw_config(cfg: Config) -> dict[str, Any] | None:
    """config.json of the model, or None where it cannot be read (`conflicts` tells that)."""
    if cfg.model.path.startswith("builtin:"):
        return None
    try:
        raw = json.loads((Path(cfg.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


class ModelFiles:
    """The folder of pi_0, its tokenizer loaded once for all checks."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.run_dir = cfg, run_dir

    @cached_property
    def _loaded(self) -> tuple[Renderer | None, str | None]:
        """The renderer, or why there is none. Neither: not to be known here, or told by `validation.conflicts`."""
        cfg = self.cfg
        from pivotrl.models.builtin import resolve_model

        if not cfg.model.path.startswith("builtin:") and raw_config(cfg) is None:
            return None, None
        try:
            folder = resolve_model(cfg.model.path)
            if not importable("transformers"):
                return None, None
            from pivotrl.rendering.chat import Renderer

            warm = self.run_dir / "warmup" / "checkpoint"
            return Renderer(warm if warm.exists() else folder, cfg.model.chat_template, cfg.domain.action_format), None
        except UserError as error:
            return None, str(error)

    @property
    def renderer(self) -> Renderer | None:
        return self._loaded[0]

    def problems(self) -> Iterator[str]:
        """Weights, tokenizer and template of the folder, and that the template can be rendered."""
        renderer, why = self._loaded
        if why is not None:
            yield why
        if renderer is None:
            return
        raw = raw_config(self.cfg) or {}
        rows, ids = raw.get("text_config", raw).get("vocab_size"), len(renderer.tokenizer)
        if isinstance(rows, int) and ids > rows:
            yield (
                f"model.path={self.cfg.model.path}: the tokenizer has {ids} tokens, the model's vocabulary {rows}: "
                "they are of different models; copy the model's own tokenizer files there"
            )

    def turns_fit(self) -> Iterator[str]:
        """Whether the longest and shortest turns, rendered with the real tokenizer, leave room for an action."""
        path, cfg = self.run_dir / "turns" / "turns.jsonl", self.cfg
        if not path.is_file() or self.renderer is None:
            return
        shortest, longest = _extremes(path)
        if not longest:
            yield f"{path} has no turns: run `pivotrl turns` again"
            return
        from pivotrl.trajectories.schema import Turn
        from pivotrl.trajectories.turn_lines import with_states

        try:
            rows = [json.loads(row) for _, row in sorted({*shortest, *longest})]
            turns = [Turn.from_json(row) for row in with_states(path, rows)]
        except UserError as error:
            yield str(error)
            return
        except (ValueError, KeyError, TypeError) as error:
            yield f"{path}: a row is no turn ({type(error).__name__}: {error}); run `pivotrl turns` again"
            return
        room = cfg.model.context_length - cfg.sampling.max_new_tokens
        try:
            tokens = [len(self.renderer.prompt_ids(turn.messages, turn.tools)) for turn in turns]
        except UserError as error:
            yield f"{path}: {error}"
            return
        if min(tokens) > room:
            yield (
                f"model.context_length={cfg.model.context_length}: even the shortest turns of {path} have "
                f"{min(tokens)} tokens, and sampling.max_new_tokens={cfg.sampling.max_new_tokens} leaves {room}: raise "
                "model.context_length"
            )
        elif max(tokens) > room:
            print(
                f"note: the longest turns have {max(tokens)} tokens; {room} fit (context_length - max_new_tokens): "
                "those beyond are skipped and counted"
            )


_STATE_BYTES = re.compile(rb'"state_bytes": (\d+), "demonstration"')


def _extremes(path: Path) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """(number, row) of the turns with the shortest and the longest states, in bounded memory."""
    shortest: list[tuple[int, int, bytes]] = []  # of a max-heap, by negated length
    longest: list[tuple[int, int, bytes]] = []
    with path.open("rb") as file:
        for number, line in zip(range(_TURNS_READ), file, strict=False):
            if not line.strip():
                continue
            told = _STATE_BYTES.search(line)
            size = int(told[1]) if told else len(line)  # a row that holds its state itself
            for heap, key in ((longest, size), (shortest, -size)):
                (heapq.heappush if len(heap) < _SAMPLES else heapq.heappushpop)(heap, (key, number, line))
    return [(number, row) for _, number, row in shortest], [(number, row) for _, number, row in longest]
