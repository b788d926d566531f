"""Giving memory back between the trainer's turn and the engine's."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any

import torch


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`, or None with another C library."""
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None


def release_unused() -> None:
    """Return freed activations to the system. On CPU glibc would keep over a gigabyte of them, twice with threads."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif (trim := _trim()) is not None:
        trim(0)
