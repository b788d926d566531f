"""Run under torchrun by test_layouts.py: every layout against Hugging Face in float32.

Arguments: folder with models and references. Prints one line a case; a difference ends with a non-zero status.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pivotrl.config import Experts, Optimizer, Parallel, Precision  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy, PairBatch  # noqa: E402
from pivotrl.policy.prefix_tree import TokenSequence  # noqa: E402
from pivotrl.refit.layout import EngineLayout  # noqa: E402

TEMPERATURE = 0.8
# The first Adam step with a large epsilon is rate / epsilon * gradient: both alike, weights move by the gradient.
GRADIENT = Optimizer(1e8, epsilon=1e8, tokens_per_microbatch=23, clip_grad=1e9)
# An epsilon that is not tiny: a step is then smooth in the gradient.
DESCENT = Optimizer(3e-3, epsilon=1e-4, tokens_per_microbatch=23, clip_grad=1e9)
DESCENT_STEPS = 4
AUX_LOSS = 0.1

# With four processes: what is not named is data parallel.
CASES: list[tuple[str, Parallel]] = [
    ("llama", Parallel()),  # DP 4: more ranks than micro-batches
    ("llama", Parallel(tensor=2)),  # vocabulary padded and split, tied head
    ("llama", Parallel(tensor=2, sequence=True)),
    ("llama", Parallel(pipeline=2)),  # the tied head is a copy on the last stage
    ("llama", Parallel(pipeline=2, virtual_pipeline=2)),
    ("llama", Parallel(context=2)),
    ("qwen3_moe", Parallel()),
    ("qwen3_moe", Parallel(tensor=2, sequence=True)),
    ("qwen3_moe", Parallel(expert=2)),
    ("qwen3_moe", Parallel(tensor=2, sequence=True, expert=2)),
    ("qwen3_moe", Parallel(tensor=2, sequence=True, expert_tensor=2)),
    ("qwen3_moe", Parallel(pipeline=2)),
    ("qwen3_moe", Parallel(tensor=2, sequence=True, pipeline=2)),
    ("qwen3_moe", Parallel(pipeline=2, expert=2, first_stage_layers=1)),
    ("qwen3_moe", Parallel(pipeline=2, expert=2, virtual_pipeline=2)),
    ("qwen3_moe", Parallel(context=2, expert=2)),
    ("nemotron_h", Parallel()),
    ("nemotron_h", Parallel(tensor=2, sequence=True, expert=2)),
    ("nemotron_h", Parallel(tensor=2, sequence=True, expert_tensor=2)),
    ("nemotron_h", Parallel(tensor=2, sequence=True, context=2)),
    ("nemotron_h", Parallel(pipeline=2, expert=2, virtual_pipeline=2)),
    ("nemotron_h", Parallel(context=4)),  # half a group of Mamba heads a rank
]


def batch() -> list[TokenSequence]:
    """Uneven prefixes, so that data-parallel ranks differ in work and some micro-batches are dummies."""
    g = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 121, (n,), generator=g).tolist()

    system = draw(6)
    return [TokenSequence.of(p, draw(2 + i)) for p in (system + draw(4), system + draw(9)) for i in range(3)]


def replayed(name: str) -> list[TokenSequence]:
    """The batch with experts for every token of the model, alike where prefixes are."""
    layers = {"qwen3_moe": 3, "nemotron_h": 2}[name]  # with experts
    draws = np.random.default_rng(0).random((121, 64, layers, 8)).argsort(-1)[..., :2]  # by token and position
    return [replace(s, experts=draws[np.array(s.token_ids), np.arange(len(s.token_ids))]) for s in batch()]


def pair_weight(sequence: Any, offset: Any) -> Any:
    """Another one for every pair, so that a mixed-up pair shows; divided by the one denominator."""
    return (0.1 + sequence * 0.3 + offset * 0.05) / 18.0


def objective(
    logprobs: torch.Tensor, entropy: torch.Tensor, pairs: PairBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(pair_weight(pairs.sequence, pairs.offset) * logprobs).sum()
    return loss, {"entropy": entropy.sum(), "pairs": torch.tensor(float(len(logprobs)))}


def load(folder: Path, parallel: Parallel, settings: Optimizer, experts: Experts | None = None) -> MegatronPolicy:
    fp32 = Precision(policy="fp32")
    return MegatronPolicy.load(folder, parallel, fp32, settings, 64, DESCENT_STEPS, seed=0, experts=experts)


def check_balance(folder: Path, parallel: Parallel, wanted: dict[str, Any]) -> None:
    """The load-balancing loss: its gradient alone, of one micro-batch whose rows several ranks share."""
    settings = replace(GRADIENT, tokens_per_microbatch=4096)
    policy = load(folder, parallel, settings, Experts(aux_loss=AUX_LOSS))
    before = {n: t.clone() for n, t in policy.hf_weights()}
    report = policy.train_step(batch(), lambda logprobs, *_: (logprobs.sum() * 0.0, {}), TEMPERATURE)
    far = {n: (before[n] - t - wanted["balanced"][n]).abs().max().item() for n, t in policy.hf_weights()}
    worst = max(far, key=lambda n: far[n])
    if dist.get_rank() == 0:
        print(f"load balancing: gradients {far[worst]:.1e} ({worst}): {parallel}", flush=True)
    assert abs(report["aux_loss"] - wanted["aux_loss"]) < 1e-5, report
    assert far[worst] < 1e-6, f"{parallel}: {worst}"


def check(folder: Path, name: str, parallel: Parallel, wanted: dict[str, Any], **changes: Any) -> None:
    what = f"{name} {parallel}"
    policy = load(folder / name, parallel, replace(GRADIENT, **changes))
    got = policy.logprobs(batch(), TEMPERATURE)
    near = max((a - b).abs().max().item() for a, b in zip(got, wanted["logprobs"], strict=True))
    if "replayed" in wanted:
        again = policy.logprobs(replayed(name), TEMPERATURE)
        near = max(near, *((a - b).abs().max().item() for a, b in zip(again, wanted["replayed"], strict=True)))
    before = {n: t.clone() for n, t in policy.hf_weights()}
    policy.train_step(batch(), objective, TEMPERATURE)
    after = dict(policy.hf_weights())
    assert set(after) - set(policy.constants) == set(wanted["gradients"])
    for n, sent in policy.weights_for(EngineLayout(dist.get_world_size())):  # an engine a rank: everything, by plan
        assert isinstance(sent, torch.Tensor) and torch.equal(sent, after[n]), f"{what}: {n}"
    far = {n: (before[n] - after[n] - g).abs().max().item() for n, g in wanted["gradients"].items()}
    worst = max(far, key=lambda n: far[n])
    assert all(torch.equal(before[n], after[n]) for n in policy.constants)
    policy = load(folder / name, parallel, replace(DESCENT, **changes))
    losses = [policy.train_step(batch(), objective, TEMPERATURE)["loss"] for _ in range(DESCENT_STEPS)]
    apart = max(abs(a - b) for a, b in zip(losses, wanted["losses"], strict=True))
    if dist.get_rank() == 0:
        print(f"log-probs {near:.1e}, gradients {far[worst]:.1e} ({worst}), losses {apart:.1e}: {what}", flush=True)
    assert near < 5e-6, what
    assert far[worst] < 1e-6, f"{what}: {worst}"
    assert apart < 2e-5 and losses[-1] < losses[0] - 0.05, f"{what}: {losses}, Hugging Face: {wanted['losses']}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    references = {n: torch.load(folder / f"{n}.reference", weights_only=False) for n in {n for n, _ in CASES}}
    for name, parallel in CASES:
        check(folder, name, parallel, references[name])
        shutdown_groups()
    overlapped = (Parallel(expert=2), Parallel(pipeline=2), Parallel(pipeline=2, virtual_pipeline=2))
    for name, parallel in zip(("qwen3_moe", "llama", "llama"), overlapped, strict=True):
        check(folder, name, parallel, references[name], overlap_grad_reduce=True, overlap_param_gather=True)
        shutdown_groups()
    check_balance(folder / "qwen3_moe", Parallel(2, context=2, expert=2, sequence=True), references["qwen3_moe"])
    shutdown_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
