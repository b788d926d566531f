"""What is freed in a training step is used again within it, and given back to the system at its end."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for mallopt
_LARGEST_MMAP_THRESHOLD = 2**25  # that glibc takes


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    name = ctypes.util.find_library("c")
    library = ctypes.CDLL(name) if name else None
    return library if hasattr(library, "malloc_trim") else None


def release_unused() -> None:
    """Return freed activations to the system. On CPU glibc would keep over a gigabyte of them, twice with threads."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


@contextmanager
def reused() -> Iterator[None]:
    """Within the block glibc keeps what is freed: a layer then takes the pages of the one before it, where new ones
    would have to be zeroed by the system each time. At the end all that is unused is returned."""
    glibc = None if torch.cuda.is_available() else _glibc()
    if glibc is not None:
        glibc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        glibc.mallopt(_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        if glibc is not None:
            glibc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        release_unused()
