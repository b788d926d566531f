"""Architectures that pivotrl/models does not map (DeepSeek, GLM, ...): through NVIDIA's Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.models.folder import ModelFolder
from pivotrl.models.output import new_folder
from pivotrl.models.registry import FAMILIES, family_for


def known(folder: ModelFolder) -> bool:
    """True where pivotrl/models maps the architecture of config.json itself."""
    try:
        family_for(folder.config)
    except (UserError, TypeError):
        _ = folder.config  # an unreadable config is its own error
        return False
    return True


def _auto_bridge(folder: ModelFolder) -> Any:
    try:
        from megatron.bridge import AutoBridge  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        ours = ", ".join(a for f in FAMILIES for a in f.architectures)
        raise UserError(
            f"{folder.path / 'config.json'}: architectures {folder.config.get('architectures')} are not mapped here "
            f"({ours} are) and Megatron-Bridge cannot be imported ({error}); on a CUDA machine install "
            "megatron-bridge and transformer-engine[pytorch], then run the same command again"
        ) from error
    return AutoBridge


def import_checkpoint(source: Path, target: Path, force: bool) -> None:
    """Hugging Face -> Megatron by Megatron-Bridge. Raises UserError where it is not installed."""
    auto = _auto_bridge(ModelFolder(source))
    with new_folder(target, _bytes(source), force) as folder:
        auto.import_ckpt(str(source), str(folder))


def export_checkpoint(config_from: Path, source: Path, target: Path, force: bool) -> None:
    """Megatron -> Hugging Face by Megatron-Bridge. Raises UserError where it is not installed."""
    auto = _auto_bridge(ModelFolder(config_from))
    with new_folder(target, _bytes(source), force) as folder:
        auto.from_hf_pretrained(str(config_from)).export_ckpt(str(source), str(folder))


def _bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
