"""Run under torchrun by test_layouts.py: log-probs and the weights after two steps, for every layout, against one rank.

Arguments: folder with models and references. Prints one line a case; a difference ends with a non-zero status.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pivotrl.config import Optimizer, Parallel, Precision  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy, PairBatch  # noqa: E402
from pivotrl.policy.prefix_tree import TokenSequence  # noqa: E402

CASES: dict[int, list[tuple[str, Parallel]]] = {
    1: [("llama", Parallel()), ("qwen3_moe", Parallel())],
    2: [
        ("llama", Parallel(tensor=2)),  # vocabulary padded and split, tied head
        ("llama", Parallel(tensor=2, sequence=True)),
        ("llama", Parallel(pipeline=2)),  # the tied head is a copy on the last stage
        ("llama", Parallel()),  # DP 2
        ("llama", Parallel(context=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True)),
        ("qwen3_moe", Parallel(expert=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True, expert=2)),
        ("qwen3_moe", Parallel(tensor=2, sequence=True, expert_tensor=2)),
        ("qwen3_moe", Parallel(pipeline=2)),
        ("qwen3_moe", Parallel()),  # DP 2
        ("qwen3_moe", Parallel(context=2, expert=2)),
    ],
}


def batch() -> list[TokenSequence]:
    """Uneven prefixes, so that data-parallel ranks differ in work and one of three micro-batches is a dummy."""
    g = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 121, (n,), generator=g).tolist()

    system = draw(6)
    return [TokenSequence.of(p, draw(2 + i)) for p in (system + draw(4), system + draw(9)) for i in range(3)]


def objective(
    logprobs: torch.Tensor, entropy: torch.Tensor, pairs: PairBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weight = 0.1 + pairs.sequence * 0.3 + pairs.offset * 0.05
    return -(weight * logprobs).sum() / 18.0, {"entropy": entropy.sum(), "pairs": torch.tensor(float(len(logprobs)))}


def run(folder: Path, name: str, parallel: Parallel) -> dict[str, object]:
    settings = Optimizer(
        1e-3, tokens_per_microbatch=23, epsilon=1e-4
    )  # a large epsilon: a step is then smooth in the gradient
    policy = MegatronPolicy.load(folder / name, parallel, Precision(policy="fp32"), settings, 64, 4, seed=0)
    logprobs = policy.logprobs(batch(), 0.8)
    reports = [policy.train_step(batch(), objective, 0.8) for _ in range(2)]
    return {"logprobs": logprobs, "reports": reports, "weights": {n: t.clone() for n, t in policy.hf_weights()}}


def compare(got: dict, wanted: dict, what: str) -> None:
    near = max((a - b).abs().max().item() for a, b in zip(got["logprobs"], wanted["logprobs"], strict=True))
    assert set(got["weights"]) == set(wanted["weights"]), f"{what}: other names"
    far = {n: (t - wanted["weights"][n]).abs().max().item() for n, t in got["weights"].items()}
    worst = max(far, key=lambda n: far[n])
    if dist.get_rank() == 0:
        print(f"{what}: log-probs {near:.1e}, weights after two steps {far[worst]:.1e} ({worst})", flush=True)
    assert near < 1e-5, what
    assert far[worst] < 5e-6, f"{what}: {worst}"
    for a, b in zip(got["reports"], wanted["reports"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "pairs"):
            assert abs(a[key] - b[key]) < 1e-4 * max(1.0, abs(b[key])), f"{what}: {key} {a[key]} {b[key]}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = int(sys.argv[2])
    for name, parallel in CASES[world]:
        got = run(folder, name, parallel)
        if world == 1:
            torch.save(got, folder / f"{name}.reference")
        else:
            compare(got, torch.load(folder / f"{name}.reference", weights_only=False), f"{name} {parallel}")
        shutdown_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
