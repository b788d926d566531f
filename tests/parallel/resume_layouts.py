"""Run by test_resume_layouts.py: a checkpoint of one layout goes on in another, against the first.

Arguments: "first", under torchrun "two", or "last"; folder with models. "first" and "last" are alone: what the first
leaves goes on in two processes, and what the two leave in the last. Prints one line a case; a difference ends with a
non-zero status.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core import parallel_state as groups  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from checkpoint_tools.dist_format import DistReader  # noqa: E402
from pivotrl.config import Optimizer, Parallel, Precision  # noqa: E402
from pivotrl.policy import agree, cpu_shim, state  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy  # noqa: E402
from pivotrl.policy.state_files import write_index, write_pieces  # noqa: E402
from tests.parallel.layouts import batch, objective  # noqa: E402

TP = Parallel(tensor=2, sequence=True)
EP = Parallel(expert=2)
DP = Parallel()
CASES = [
    ("qwen3_moe", TP, DP, "fp32"),
    ("qwen3_moe", EP, DP, "fp32"),
    ("qwen3_moe", DP, Parallel(tensor=2, sequence=True, expert=2), "fp32"),
    ("qwen3_moe", Parallel(pipeline=2, virtual_pipeline=2), TP, "bf16"),
    ("qwen3_moe", Parallel(pipeline=2), Parallel(pipeline=2, virtual_pipeline=2), "fp32"),
    ("nemotron_h", TP, Parallel(pipeline=2), "bf16"),  # sections of the Mamba projection are each split
    ("llama", DP, TP, "fp32"),  # the vocabulary is padded for two ranks
    ("llama", TP, Parallel(pipeline=2), "bf16"),  # the tied head is a copy on the last stage
]


def load(folder: Path, parallel: Parallel, precision: str) -> MegatronPolicy:
    settings = Optimizer(1e-3, tokens_per_microbatch=23, epsilon=1e-4)
    return MegatronPolicy.load(folder, parallel, Precision(policy=precision), settings, 64, 4, seed=0)


def save(policy: MegatronPolicy, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    agree.wait()
    written = agree.to_first(write_pieces(folder, dist.get_rank(), state.snapshot(policy, state.adam_steps(policy))))
    if dist.get_rank() == 0:
        write_index(folder, written, policy.step)
    agree.wait()


def same(one: Path, two: Path, padded: bool) -> None:
    a, b = DistReader(one), DistReader(two)
    assert set(a.tensors) == set(b.tensors), set(a.tensors) ^ set(b.tensors)
    for key in a.tensors:
        x, y = a.read(key), b.read(key)
        rows = min(len(x), len(y)) if padded else len(x)
        assert torch.equal(x[:rows], y[:rows]), key
        assert x.shape == y.shape or padded, key


def loads_into_megatron(policy: MegatronPolicy, folder: Path) -> None:
    """megatron-core's own loader takes the checkpoint."""
    metadata = {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    with cpu_shim.scope(), torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
        wanted = policy.model.sharded_state_dict(metadata=metadata)
        wanted = {k: v for k, v in wanted.items() if not k.endswith("_extra_state")}  # Transformer Engine's
        loaded = dist_checkpointing.load(wanted, str(folder))
        policy.model.load_state_dict(loaded, strict=False)
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


def run(models: Path, number: int) -> None:
    name, first, second, precision = CASES[number]
    one, two = models / f"{number}-one", models / f"{number}-two"
    policy = load(models / name, first, precision)
    for _ in range(2):
        policy.train_step(batch(), objective, 0.8)
    save(policy, one)
    if number == 0:
        loads_into_megatron(policy, one)
    for _ in range(2):
        policy.train_step(batch(), objective, 0.8)
    wanted = {n: t.clone() for n, t in policy.hf_weights()}
    if dist.get_rank() == 0:
        save_file({n: t.contiguous() for n, t in wanted.items()}, models / f"{number}-wanted.safetensors")
    shutdown_groups()
    policy = load(models / name, second, precision)
    state.load(policy, one, 2, 2)
    assert policy.step == 2
    assert state.adam_steps(policy) == 2
    save(policy, two)
    same(one, two, padded=name == "llama")
    two_steps_are(policy, wanted, f"{name} {precision} {first} -> {second}", 1e-6 if precision == "fp32" else 2e-2)
    shutdown_groups()


def two_steps_are(policy: MegatronPolicy, wanted: dict[str, torch.Tensor], what: str, limit: float) -> None:
    for _ in range(2):
        policy.train_step(batch(), objective, 0.8)
    far = {n: (t.float() - wanted[n].float()).abs().max().item() for n, t in policy.hf_weights()}
    worst = max(far, key=lambda n: far[n])
    if dist.get_rank() == 0:
        print(f"{what}: equal; two steps later {far[worst]:.1e} ({worst})", flush=True)
    assert far[worst] < limit, worst


def leave_one(models: Path) -> None:
    policy = load(models / "qwen3_moe", DP, "fp32")
    for _ in range(2):
        policy.train_step(batch(), objective, 0.8)
    save(policy, models / "alone")
    for _ in range(2):
        policy.train_step(batch(), objective, 0.8)
    save_file({n: t.clone().contiguous() for n, t in policy.hf_weights()}, models / "alone-wanted.safetensors")


def go_on(models: Path, name: str) -> None:
    """Two steps from a checkpoint that another number of processes has left."""
    policy = load(models / "qwen3_moe", DP, "fp32")
    state.load(policy, models / ("alone" if name == "alone" else f"{name}-one"), 2, 2)
    wanted = load_file(models / f"{name}-wanted.safetensors")
    two_steps_are(policy, wanted, f"{name} in {dist.get_world_size()} processes", 1e-6)
    shutdown_groups()


def main(part: str, models: Path) -> None:
    torch.set_num_threads(1)
    if part == "first":
        leave_one(models)
    elif part == "last":
        for number in (0, 1):
            go_on(models, str(number))
    else:
        for number in range(len(CASES)):
            run(models, number)
        go_on(models, "alone")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
