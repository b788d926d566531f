"""Run by test_checkpoint_layouts.py, alone or under torchrun: megatron-core itself loads what checkpoint_tools wrote.

Arguments: folder with <model>/ (Hugging Face) and <model>.<norms>/ (converted), and the number of processes. Every
parameter of a stock GPTModel must be the shard that the mapping says, in each layout; one process also compares logits.
Each layout is then saved again by megatron-core, for the test to convert back.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core import parallel_state as groups  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402

from pivotrl.config import Parallel  # noqa: E402
from pivotrl.models.folder import ModelFolder  # noqa: E402
from pivotrl.models.mapping import local_shard, plan  # noqa: E402
from pivotrl.models.registry import family_for  # noqa: E402
from pivotrl.policy import cpu_shim, distributed  # noqa: E402
from pivotrl.policy.model import transformer_config  # noqa: E402
from pivotrl.policy.weights import place_of  # noqa: E402

CASES: dict[int, list[tuple[str, Parallel]]] = {
    1: [("llama", Parallel()), ("qwen3", Parallel()), ("qwen3_moe", Parallel())],
    2: [
        ("llama", Parallel(tensor=2)),
        ("llama", Parallel(pipeline=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True)),
        ("qwen3_moe", Parallel(expert=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True, expert=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True, expert_tensor=2)),
        ("qwen3_moe", Parallel(pipeline=2)),
    ],
}
# how the model asks for its names: megatron-core's default, and with every layer and expert under a name of its own
NAMINGS: dict[str, dict[str, Any]] = {"default": {}, "single": {"singleton_local_shards": True}}


def label(name: str, p: Parallel) -> str:
    return f"{name}-tp{p.tensor}pp{p.pipeline}ep{p.expert}etp{p.expert_tensor}"


def stock_model(folder: ModelFolder, parallel: Parallel, device: str = "cpu") -> Any:
    """A plain megatron-core GPTModel of a Hugging Face config: its own norms, attention and MLP."""
    family = family_for(folder.config)
    dims = family.dims(folder.config)
    config = transformer_config(family.to_megatron_kwargs(folder.config), dims, parallel, torch.float32, False)
    config.use_te_activation_func = False
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if config.sequence_parallel:  # torch's norm refuses it; nothing is computed in those layouts
        config.sequence_parallel = False
    with torch.device(device):
        return GPTModel(
            config,
            spec,
            vocab_size=-(-dims.vocab // parallel.tensor) * parallel.tensor,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=10000,
            pre_process=groups.is_pipeline_first_stage(),
            post_process=groups.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=dims.tied,
        )


def check(root: Path, name: str, parallel: Parallel) -> None:
    folder = ModelFolder(root / name)
    family = family_for(folder.config)
    dims = family.dims(folder.config)
    table = plan(family.rules, dims)
    model = stock_model(folder, parallel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    wanted = model.sharded_state_dict()
    loaded, left_over, absent = dist_checkpointing.load(
        wanted, str(root / f"{name}.local" / "release"), strict="return_all"
    )
    assert all("_extra_state" in key for key in absent), absent
    assert not left_over, left_over
    model.load_state_dict({k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}, strict=False)
    place = place_of(model)
    for local, parameter in model.named_parameters():
        assert torch.equal(parameter, local_shard(local, table, dims, place, folder.tensor)), f"{name}: {local}"
    if dist.get_world_size() == 1:
        compare_logits(root / name, model)
    replicas = {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
    for naming, metadata in NAMINGS.items():
        out = root / "saved" / f"{label(name, parallel)}-{naming}"
        if dist.get_rank() == 0:
            out.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(metadata={**metadata, **replicas}), str(out))
    if dist.get_rank() == 0:
        print(f"{label(name, parallel)}: loaded and saved", flush=True)


def compare_logits(folder: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = (torch.arange(24)[None] * 7) % 121
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    with torch.no_grad():
        got = model.eval()(ids, torch.arange(24)[None], mask)[..., : reference.config.vocab_size]
        far = (got - reference(ids).logits).abs().max().item()
    print(f"{folder.name}: logits of megatron-core and transformers differ by {far:.1e}", flush=True)
    assert far < 1e-5


def true_shapes(folder: Path) -> None:
    """On meta tensors: names and global shapes that megatron-core gives a model are those that a conversion writes."""
    from checkpoint_tools.keys import default_style, sizes

    source = ModelFolder(folder)
    family = family_for(source.config)
    dims = family.dims(source.config)
    model = stock_model(source, Parallel(), "meta")
    wanted: dict[str, tuple[int, ...]] = {}
    for value in model.sharded_state_dict().values():
        parts = value.build() if hasattr(value, "build") else [value]
        for part in parts:
            if "_extra_state" not in part.key:
                wanted[part.key] = tuple(part.global_shape)
    written = sizes(plan(family.rules, dims), dims, default_style(dims, "local"))
    assert written == wanted, set(written.items()) ^ set(wanted.items())
    print(f"{folder.name}: {len(written)} tensors as megatron-core has them", flush=True)


def main(root: Path, world: int) -> None:
    torch.set_num_threads(1)
    for name, parallel in CASES[world]:
        distributed.initialise(parallel)
        with cpu_shim.scope():
            check(root, name, parallel)
            for folder in sorted(root.glob("shapes-*")) if world == 1 and name == "llama" else []:
                true_shapes(folder)
        distributed.shutdown_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
