"""A profile belongs to a policy (design idea 5): what its rewards depend on, as one comparable record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pivotrl.configuration import flatten
from pivotrl.errors import UserError


def digest(value: Any) -> str:
    """Short hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def weights_digest(model_dir: Path) -> str:
    """Hash of the bytes of all safetensors files of a Hugging Face folder."""
    hasher = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        hasher.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                hasher.update(block)
    return hasher.hexdigest()[:16]


def fingerprint(
    *,
    weights: str,
    template: str,
    sampling: dict[str, Any],
    verifier: tuple[str, str, dict[str, Any]],
    turns: Iterable[Any],
) -> dict[str, Any]:
    """The record. `verifier` is (name, version, config); `turns` are the profiled turns' JSON rows."""
    name, version, config = verifier
    rows = hashlib.sha256()
    for row in turns:
        rows.update(json.dumps(row, sort_keys=True).encode())
    return {
        "weights": weights,
        "template": template,
        "sampling": sampling,
        "verifier": {"name": name, "version": version, "config": config},
        "turns": rows.hexdigest()[:16],
    }


def differences(profile: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """One line for each value that differs, by its dotted key: "sampling.temperature: profile 1.0, now 0.7"."""
    before, now = flatten(profile), flatten(present)
    return [
        f"{k}: profile {before.get(k, '(absent)')}, now {now.get(k, '(absent)')}"
        for k in sorted({*before, *now})
        if before.get(k, "(absent)") != now.get(k, "(absent)")
    ]


def require_same(profile: dict[str, Any], present: dict[str, Any], allow_foreign: bool) -> list[str]:
    """The differences, refused unless `allow_foreign` (difficulty does not transfer between models: method.md 3.7)."""
    found = differences(profile, present)
    if found and not allow_foreign:
        lines = "\n  ".join(found)
        raise UserError(
            f"this profile was made by another policy or setting:\n  {lines}\n"
            "Profile again with `pivotrl profile`, or set algorithm.allow_foreign_profile=true to train on it anyway."
        )
    return found
