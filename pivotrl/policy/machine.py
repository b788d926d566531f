"""What this process's machine has of what FP8 needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from pivotrl.fp8 import Machine


def this_machine() -> Machine:
    """GPU, Transformer Engine and CUDA of this process."""
    present = torch.cuda.is_available()
    toolkit = _version(torch.version.cuda) if torch.version.cuda else None
    return Machine(torch.cuda.get_device_capability() if present else None, engine_version(), toolkit)


def engine_version() -> tuple[int, int] | None:
    """(major, minor) of the installed Transformer Engine; None without one."""
    try:
        return _version(version("transformer-engine"))
    except PackageNotFoundError:
        return None


def uses_transformer_engine() -> bool:
    """Layers are Transformer Engine's (fused norms, grouped experts, FP8) where it is installed and a GPU is there."""
    return torch.cuda.is_available() and engine_version() is not None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
