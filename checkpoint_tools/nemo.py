"""NeMo 2.0 checkpoints: `weights/`, a Megatron distributed checkpoint, and `context/`, how NeMo builds the model.

The weights need no nemo. The context is written by nemo-toolkit from its own model classes, so a NeMo checkpoint is
made here with the context of another one of the same model (an import by NeMo, say the one that training began with).
"""

from __future__ import annotations

from pathlib import Path

from pivotrl.errors import UserError

WEIGHTS, CONTEXT = "weights", "context"
PREFIX = "module."  # before every parameter's name: NeMo saves the model inside its Lightning module
VERSIONS = "nemo-toolkit[nlp]>=2.0,<3"
HOW = f"{VERSIONS} (3.0 has no language models any more)"


def context_of(folder: Path) -> Path:
    """The context/ folder of a NeMo 2.0 checkpoint, given either. Raises UserError where it is none."""
    context = folder if folder.name == CONTEXT else folder / CONTEXT
    if not (context / "io.json").is_file() and not (context / "model.yaml").is_file():
        raise UserError(
            f"{folder}: no context/ of a NeMo 2.0 checkpoint there (io.json, model.yaml); import the model once with "
            f"{HOW} and give that checkpoint: its context is copied, its weights are not"
        )
    return context
