"""Do the weights sent for a refit match the engine's model? Pure: names, shapes and numbers only.

Expected names and shapes are those of the model folder's safetensors headers, so a trainer that forgets, invents or
mis-shapes a tensor is caught by comparison with the checkpoint format itself, not with its own mapping.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from pivotrl.errors import UserError
from pivotrl.generation.engine import RefitError
from pivotrl.models.dims import FURTHER_TOKENS

Shape = tuple[int, ...]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class ExpectedWeights:
    """What a complete refit sends: `shapes` by Hugging Face name; `tied` heads may be sent or left out, and so may
    what is served `elsewhere` (experts of other ranks)."""

    shapes: dict[str, Shape]
    tied: bool = False
    elsewhere: frozenset[str] = frozenset()

    @property
    def optional(self) -> frozenset[str]:
        return self.elsewhere | {HEAD} if self.tied else self.elsewhere

    @classmethod
    def from_folder(cls, folder: Path) -> ExpectedWeights:
        """Read config.json and the headers (no tensor data) of every *.safetensors file of a model folder."""
        shapes: dict[str, Shape] = {}
        for path in sorted(folder.glob("*.safetensors")):
            found = read_safetensors_shapes(path)
            shapes.update({name: shape for name, shape in found.items() if not re.fullmatch(FURTHER_TOKENS, name)})
        if not shapes:
            raise UserError(
                f"{folder}: no *.safetensors file; the engine needs a model folder with safetensors weights"
            )
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # absent key: transformers' default is True; a head in the file that nothing ties is a head of its own
        tied = bool(config.get("tie_word_embeddings", HEAD not in shapes))
        if tied and EMBEDDING in shapes:
            shapes.setdefault(HEAD, shapes[EMBEDDING])
        return cls(shapes, tied)


def read_safetensors_shapes(path: Path) -> dict[str, Shape]:
    """Tensor names and shapes of one safetensors file, from its header. Raises UserError if it is not one."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) == 8 and (size := struct.unpack("<Q", prefix)[0]) < 100 * 2**20:
            try:
                header = json.loads(file.read(size))
                return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
            except (ValueError, KeyError, TypeError, AttributeError):
                pass
    raise UserError(f"{path} is not a readable safetensors file (damaged or cut short?); copy it again")


def is_scale(name: str) -> bool:
    """Scales of quantised weights and activations, which must never be zero."""
    return name.endswith(("_scale", "_scale_inv", ".scale"))


def non_finite(name: str) -> RefitError:
    return RefitError(f"refit: weight {name!r} holds NaN or infinite values; the update that made it diverged")


@dataclass
class RefitCheck:
    """Collects what is sent during one refit. `add` each tensor before it is loaded, then `finish`."""

    expected: ExpectedWeights
    seen: set[str] = field(default_factory=set)

    def add(self, name: str, shape: Shape, *, finite: bool) -> None:
        """Raises RefitError naming the tensor if it is unknown, sent twice, misshapen or not finite."""
        want = self.expected.shapes.get(name)
        if want is None:
            raise RefitError(f"refit: the engine's model has no weight {name!r}{self._hint(name)}")
        if name in self.seen:
            raise RefitError(f"refit: weight {name!r} was sent twice")
        if tuple(shape) != want:
            raise RefitError(f"refit: weight {name!r} has shape {tuple(shape)}, the engine's model expects {want}")
        if not finite:
            raise non_finite(name)
        self.seen.add(name)

    def finish(self) -> None:
        """Raises RefitError listing what was not sent."""
        missing = sorted(self.expected.shapes.keys() - self.seen - self.expected.optional)
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise RefitError(f"refit: {len(missing)} of {len(self.expected.shapes)} weights were not sent: {shown}")

    def _hint(self, name: str) -> str:
        import difflib

        close = difflib.get_close_matches(name, self.expected.shapes, n=1, cutoff=0.8)
        return f"; did you mean {close[0]!r}?" if close else ""
