"""A copy of a model folder whose linear layers are FP8 in blocks, for an engine that serves in FP8."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pivotrl.locks import hold
from pivotrl.models import block_fp8
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import plan
from pivotrl.models.output import Planned, SafetensorsWriter, carry_over, new_folder
from pivotrl.models.registry import family_for

SOURCE = "pivotrl_fp8_source.json"  # of which files the copy was made
SHARD_BYTES = 4 * 2**30
_WAIT_SECONDS = 3600.0  # for another rank that writes the copy


def fp8_copy(source: Path, target: Path) -> Path:
    """Write `target`, or keep it where it was made of these very files. Safe for many ranks at once.

    A folder that is FP8 already is given back as it is. Raises UserError for a folder of another quantisation and for
    weights that are not finite.
    """
    folder = ModelFolder(source)
    if block_fp8.block_size(folder.config, str(source / "config.json")) is not None:
        return source
    with hold(target.with_name(f".{target.name}.fp8.lock"), wait_seconds=_WAIT_SECONDS):
        files = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(source.glob("*.safetensors"))}
        made_of = json.dumps({"folder": str(source.resolve()), "files": files})
        manifest = target / SOURCE
        if not manifest.is_file() or manifest.read_text(encoding="utf-8") != made_of:
            _write(folder, target, made_of)
    folder.close()
    return target


def _write(folder: ModelFolder, target: Path, made_of: str) -> None:
    family = family_for(folder.config)
    table = plan(family.rules, family.dims(folder.config))
    quantised = {name for entry in table.values() if block_fp8.quantised(entry) for name in entry.hf}
    planned: list[Planned] = []
    for name, info in folder.infos.items():
        if name in quantised:
            planned.append(Planned(name, block_fp8.FP8, info.shape))
            planned.append(Planned(name + block_fp8.SCALE, torch.float32, block_fp8.scale_shape(info.shape)))
        else:
            planned.append(Planned(name, info.dtype, info.shape))
    with new_folder(target, sum(t.nbytes for t in planned), force=True) as made:
        writer = SafetensorsWriter(made, planned, SHARD_BYTES)
        for name in folder.infos:
            if name in quantised:
                values, scales = block_fp8.quantise(name, folder.tensor(name))
                writer.put(name, values)
                writer.put(name + block_fp8.SCALE, scales)
            else:
                writer.put(name, folder.tensor(name))
        writer.finish()
        carry_over(folder.path, made, None, {"quantization_config": block_fp8.config_of(table.values())})
        (made / SOURCE).write_text(made_of, encoding="utf-8")
