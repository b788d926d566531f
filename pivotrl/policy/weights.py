"""Weights between a Hugging Face folder and the shards of a running model: loading, gathering, writing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from pivotrl.config import Parallel
from pivotrl.layout import layer_places, stage_layers
from pivotrl.models.dims import FURTHER_TOKENS, Dims
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import Entry, Place, check_source, global_name, local_shard, merge, plan, unpack
from pivotrl.models.output import Planned, SafetensorsWriter, carry_over, new_folder
from pivotrl.models.registry import Family
from pivotrl.policy.model import PolicyModel

SHARD_BYTES = 4 * 2**30  # size of one written safetensors file


def place_of(model: PolicyModel) -> Place:
    """Where this rank stands in the parallel groups."""
    return Place(
        tp_rank=groups.get_tensor_model_parallel_rank(),
        tp_size=groups.get_tensor_model_parallel_world_size(),
        ep_rank=groups.get_expert_model_parallel_rank(),
        ep_size=groups.get_expert_model_parallel_world_size(),
        etp_rank=groups.get_expert_tensor_parallel_rank(),
        etp_size=groups.get_expert_tensor_parallel_world_size(),
        layer_offset=get_transformer_layer_offset(model.config, vp_stage=model.vp_stage),
    )


def named_parameters(chunks: Sequence[PolicyModel], dims: Dims) -> Iterator[tuple[str, Tensor]]:
    """(global megatron name, parameter) of everything that this rank holds."""
    for model in chunks:
        place = place_of(model)
        for name, parameter in model.named_parameters():
            yield global_name(name, place, dims), parameter


def stage_layers_of(model: PolicyModel) -> tuple[int, ...]:
    """Layers of each pipeline stage."""
    c = model.config
    first, last = c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage
    sizes = Parallel(pipeline=c.pipeline_model_parallel_size, first_stage_layers=first, last_stage_layers=last)
    return stage_layers(sizes, c.num_layers)


def load_weights(
    chunks: Sequence[PolicyModel], folder: ModelFolder, family: Family, dims: Dims
) -> tuple[dict[str, Entry], dict[str, Tensor]]:
    """Fill every parameter from the folder: (the table of what is trained, what is constant by Hugging Face name).

    Raises UserError naming what is missing, unknown or misshapen.
    """
    whole = plan(family.rules, dims)
    check_source(whole, folder.shapes, (*family.ignored_names(dims), FURTHER_TOKENS), str(folder.path))
    trained = {name: entry for name, entry in whole.items() if not entry.rule.constant}
    for model in chunks:
        _load_chunk(model, folder, dims, trained)
    constants = {n: folder.tensor(n).float() for e in whole.values() if e.rule.constant for n in e.hf}
    folder.close()
    return trained, constants


def set_constants(chunks: Sequence[PolicyModel], family: Family, dims: Dims, constants: Mapping[str, Tensor]) -> None:
    """Fill the constant buffers, in float32 whatever the parameters' dtype."""
    whole = plan(family.rules, dims)
    for model in chunks:
        place = place_of(model)
        for name, buffer in model.named_buffers():
            entry = whole.get(global_name(name, place, dims))
            if entry is not None:
                buffer.data = constants[entry.hf[0]].to(buffer.device, copy=True)


def _load_chunk(model: PolicyModel, folder: ModelFolder, dims: Dims, table: dict[str, Entry]) -> None:
    place = place_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(local_shard(name, table, dims, place, folder.tensor))
            entry = table.get(global_name(name, place, dims))
            if entry and entry.rule.expert:
                # with one expert-parallel rank megatron-core reduces experts over the ranks of dense weights, which is
                # silently wrong where expert_tensor differs from tensor: several ranks then hold the same expert
                parameter.allreduce = False
            axis = entry.rule.axis if entry else 0  # without an entry: a tied head's copy of the embedding
            if axis is not None and not getattr(parameter, "tensor_model_parallel", False):
                # megatron-core sets these when it initialises weights itself; without them the gradient norm counts the
                # shards of the first rank only
                stride = 2 if entry and entry.rule.layout == "gate_up" else 1
                set_tensor_model_parallel_attributes(parameter, True, axis, stride)


def full_weights(chunks: Sequence[PolicyModel], dims: Dims, table: dict[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, whole, on every rank. All ranks must consume it to the end, in step."""
    model = chunks[0]
    place = place_of(model)
    own = {n: p.detach() for n, p in named_parameters(chunks, dims)}
    per_rank = dims.experts // place.ep_size if dims.experts else 0
    for name, entry in table.items():
        if entry.expert is None:
            yield from unpack(entry, _share_stage(_gather(entry, own.get(name), place), entry, model), dims)
        elif entry.expert < per_rank:  # this expert of every rank of the expert-parallel group, in one gather
            mine = name.replace(
                f".local_experts.{entry.expert}.", f".local_experts.{entry.expert + place.ep_rank * per_rank}."
            )
            full = _share_stage(_gather(entry, own.get(mine), place), entry, model)
            for rank, expert in enumerate(_all_gather(full, groups.get_expert_model_parallel_group(), place.ep_size)):
                other = name.replace(
                    f".local_experts.{entry.expert}.", f".local_experts.{entry.expert + rank * per_rank}."
                )
                yield from unpack(table[other], expert, dims)


def _gather(entry: Entry, shard: Tensor | None, place: Place) -> Tensor | None:
    """Shards of the tensor-parallel ranks -> the full megatron tensor; None on stages that do not hold it."""
    _, size = place.split(entry.rule)
    if shard is None or size == 1 or entry.rule.axis is None:
        return shard
    group = groups.get_expert_tensor_parallel_group() if entry.rule.expert else groups.get_tensor_model_parallel_group()
    return merge(entry, _all_gather(shard, group, size))


def _all_gather(tensor: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _share_stage(full: Tensor | None, entry: Entry, model: PolicyModel) -> Tensor:
    """Send a tensor from the pipeline stage that holds it to the others."""
    stages = groups.get_pipeline_model_parallel_world_size()
    if stages == 1:
        assert full is not None, f"no rank holds {entry.hf}"
        return full
    if entry.layer is not None:
        chunks = model.config.virtual_pipeline_model_parallel_size or 1
        owner = layer_places(stage_layers_of(model), chunks)[entry.layer].stage
    else:
        owner = 0 if entry.rule.megatron.startswith("embedding.") else stages - 1
    if groups.get_pipeline_model_parallel_rank() != owner:
        rows = sum(shape[0] for shape in entry.shapes)
        parameter = next(model.parameters())
        full = torch.empty((rows, *entry.shapes[0][1:]), dtype=parameter.dtype, device=parameter.device)
    assert full is not None, f"stage {owner} does not hold {entry.hf}"
    group = groups.get_pipeline_model_parallel_group()
    full = full.contiguous()
    dist.broadcast(full, dist.get_process_group_ranks(group)[owner], group=group)
    return full


def write_folder(
    weights: Iterable[tuple[str, Tensor]],
    table: Mapping[str, Entry],
    out_dir: Path,
    source_dir: Path,
    dtype: torch.dtype,
    extra: Mapping[str, str],
    carried: Collection[str] = (),
) -> None:
    """Write a Hugging Face folder; rank 0 writes, every rank takes part in gathering `weights` (those of `table`).

    The folder appears under its name only when it is whole: it is written beside it and renamed. config.json,
    generation_config.json, the tokenizer and the like are carried over from `source_dir`, and so are tensors that are
    not the policy's to change (`carried`, by name); `extra` holds files (name -> text) that take their place.
    """
    if dist.get_rank() != 0:
        for _ in weights:
            pass
    else:
        entries = table.values()
        planned = [Planned(n, dtype, s) for entry in entries for n, s in zip(entry.hf, entry.shapes, strict=True)]
        source = ModelFolder(source_dir)
        kept = [n for n in source.file_of if n in carried or re.fullmatch(FURTHER_TOKENS, n)]
        planned += [Planned(n, source.infos[n].dtype, source.infos[n].shape) for n in kept]
        with new_folder(out_dir, sum(t.nbytes for t in planned), force=True) as folder:
            writer = SafetensorsWriter(folder, planned, SHARD_BYTES)
            for name, tensor in weights:
                writer.put(name, tensor.cpu())
            for name in kept:
                writer.put(name, source.tensor(name))
            writer.finish()
            source.close()
            carry_over(source_dir, folder, dtype)
            for name, text in extra.items():
                (folder / name).write_text(text, encoding="utf-8")
    dist.barrier()
