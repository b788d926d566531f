"""Tiny models on disk, made once a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import NAMES, save_tiny


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Name -> (folder, Hugging Face model)."""
    root = tmp_path_factory.mktemp("tiny")
    return {name: (root / name, save_tiny(name, root / name)) for name in NAMES}
