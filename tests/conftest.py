"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No example has a time limit: a busy machine is no failure.
settings.register_profile("pivotrl", deadline=None)
settings.load_profile("pivotrl")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the shared recorded trajectories (env PIVOTRL_SHARED)."""
    folder = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"shared data not found at {folder} (set PIVOTRL_SHARED)")
    return folder
