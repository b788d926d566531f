"""Run under torchrun by test_refit_layouts.py: refits from every trainer layout of two ranks into every engine layout.

After 1, 2 and 10 refits the engine's tokens and log-probs must be, to the bit, those of a fresh engine that loaded the
exported weights. Arguments: folder with the models. A difference ends with a non-zero status.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from pivotrl.config import Generation, Parallel, Precision  # noqa: E402
from pivotrl.generation.engine import EngineStateError, RefitError, Sampling  # noqa: E402
from pivotrl.generation.vllm_engine import VllmEngine  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy  # noqa: E402

Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]
PROMPTS = [[(7 * i + 3 * j) % 320 for j in range(40 + i)] for i in range(3)]
TRAINERS = {  # with the number of refits
    "llama": [(Parallel(), 2), (Parallel(tensor=2), 10), (Parallel(pipeline=2), 2)],  # the first is DP 2
    "moe": [
        (Parallel(), 2),
        (Parallel(tensor=2, sequence=True), 2),
        (Parallel(expert=2), 2),
        (Parallel(tensor=2, sequence=True, expert=2), 10),
        (Parallel(tensor=2, sequence=True, expert_tensor=2), 2),
        (Parallel(pipeline=2), 2),
    ],
    "smollm2": [(Parallel(pipeline=2), 10)],  # the real model; its tied head lies on both stages
}
ENGINES = {"smollm2": (1,)}  # nine heads do not divide by two


def answers(engine: VllmEngine) -> Answers:
    groups = engine.generate(PROMPTS, Sampling(temperature=0.7, max_new_tokens=4), 2, [1, 2, 3])
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


def build(folder: Path, tensor: int) -> VllmEngine:
    return VllmEngine(folder, Generation(max_sequences=16, tensor_parallel=tensor), "fp32", 128, 0, [])


def check_layout(
    engine: VllmEngine, folders: list[Path], parallel: Parallel, refits: int, fresh: list[Answers]
) -> None:
    policies = [MegatronPolicy.load(f, parallel, Precision(policy="fp32"), None, 128, 1, seed=0) for f in folders]
    for policy, folder in zip(policies, folders, strict=True):
        on_disk = load_file(folder / "model.safetensors")
        exported = {name: tensor.clone() for name, tensor in policy.hf_weights()}
        assert exported.keys() == on_disk.keys() and all(torch.equal(exported[n], on_disk[n]) for n in on_disk)
    start = time.perf_counter()
    for number in range(1, refits + 1):
        which = (number + 1) % 2
        engine.refit(policies[which].weights_for(engine.layout), number)
        assert engine.last_refit is not None and not engine.last_refit.unverified
        if number in (1, 2, 10):
            assert answers(engine) == fresh[which], f"{parallel}: refit {number}"
    traffic = policies[0].refit_source.traffic(engine.layout)
    assert traffic["received_mb"] == traffic["bound_mb"], traffic
    if dist.get_rank() == 0:
        mb = {name: round(value, 3) for name, value in traffic.items()}
        print(f"  {parallel}: {refits} refits in {time.perf_counter() - start:.1f} s, {mb}", flush=True)
    shutdown_groups()


def check_faults(engine: VllmEngine, folder: Path, fresh: Answers) -> None:
    """Whole tensors are cut by the engine itself; one bad rank stops all ranks."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    bad = {**weights, name: torch.full_like(weights[name], float("nan"))} if dist.get_rank() == 1 else weights
    try:
        engine.refit(iter(bad.items()), 98)
        raise AssertionError("a NaN on rank 1 went unseen")
    except RefitError as error:
        assert name in str(error)
    try:
        answers(engine)
        raise AssertionError("generated from half-loaded weights")
    except EngineStateError:
        pass
    engine.refit(list(weights.items()), 99)
    assert answers(engine) == fresh


def check_reload(engine: VllmEngine, folders: list[Path], fresh: list[Answers]) -> None:
    """The way of GPUs and of unknown layers: vLLM's own reload, from shards in their place among NaN."""
    engine._refit._direct = None
    for which in (0, 1):
        policy = MegatronPolicy.load(folders[which], Parallel(), Precision(policy="fp32"), None, 128, 1, seed=0)
        engine.refit(policy.weights_for(engine.layout), 100 + which)
        assert answers(engine) == fresh[which]
    shutdown_groups()


def main(root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_layout: dict[tuple[str, int], list[Answers]] = {}
    for tensor in (2, 1):
        for family, trainers in TRAINERS.items():
            if tensor not in ENGINES.get(family, (2, 1)):
                continue
            folders = [root / f"{family}{seed}" for seed in (0, 1)]
            first = build(folders[0], tensor)
            fresh = [answers(first)]
            first.close()
            engine = build(folders[1], tensor)
            fresh.append(answers(engine))
            assert fresh[0] != fresh[1]
            by_layout[family, tensor] = fresh
            if dist.get_rank() == 0:
                print(f"{family}, engine of {tensor} rank(s)", flush=True)
            for parallel, refits in trainers:
                check_layout(engine, folders, parallel, refits, fresh)
            check_faults(engine, folders[0], fresh[0])
            check_reload(engine, folders, fresh)
            engine.close()
    for family in TRAINERS.keys() - ENGINES.keys():  # both engine layouts compute the same model
        for one, two in zip(by_layout[family, 1], by_layout[family, 2], strict=True):
            for (ids, logprobs), (other_ids, other) in zip(one, two, strict=True):
                assert ids == other_ids and max(abs(a - b) for a, b in zip(logprobs, other, strict=True)) < 1e-4
    total = torch.ones(1)
    dist.all_reduce(total)  # the group that the trainer made still works
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
