"""Run by test_loss_layouts.py: every loss on the real policy, alone or under torchrun; writes or compares reports.

Arguments: model folder, file of the reports of one process, "1" (write) or "2" (compare, DP 2, TP 2 and CP 2).
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pivotrl.config import Algorithm, Config, Optimizer, Parallel, Precision  # noqa: E402
from pivotrl.generation.engine import Completion  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy  # noqa: E402
from pivotrl.rollouts import Rollout  # noqa: E402
from pivotrl.training.advantages import RULES  # noqa: E402
from pivotrl.training.batch import make_batch  # noqa: E402
from pivotrl.training.nonfinite import NonFiniteSteps  # noqa: E402
from pivotrl.training.objective import AGGREGATIONS  # noqa: E402
from pivotrl.training.update import update  # noqa: E402
from pivotrl.trajectories.schema import Action  # noqa: E402
from pivotrl.verifiers.base import Verdict  # noqa: E402

LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"epochs": 2, "minibatches": 2, "dual_clip": 3.0},
    "geometric": {"ratio": "geometric", "clip_low": 0.01, "clip_high": 0.01, "epochs": 2},
    "cispo": {"loss": "cispo", "minibatches": 2},
    "kl": {"kl_beta": 0.1, "kl_estimator": "unbiased", "entropy_bonus": 0.01},
    "kl reward": {"kl_beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "importance": {"importance_correction": "truncated", "importance_cap": 1.01},
    "dpo": {"loss": "dpo", "minibatches": 2},
}
COMPARED = ("loss", "grad_norm", "entropy", "mismatch_abs", "mismatch_max", "mismatch_k3", "importance_ess", "kl")
COMPARED += ("clip_low_fraction", "clip_high_fraction", "target_tokens", "tokens_total", "dpo_margin", "update_kl")


def cases() -> list[tuple[str, Algorithm]]:
    combined = [
        (f"{aggregation} {rule}", Algorithm(aggregation=aggregation, advantage=rule))
        for aggregation in AGGREGATIONS
        for rule in sorted(RULES)
    ]
    return combined + [(name, Algorithm(**options)) for name, options in LOSSES.items()]


def groups() -> tuple[list[Any], list[list[Rollout]]]:
    g = torch.Generator().manual_seed(3)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 121, (n,), generator=g).tolist())

    system = draw(6)
    states = [SimpleNamespace(prompt_ids=system + draw(n)) for n in (4, 9, 5, 7)]
    rewards = ([1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0.5, 0, 1, None])
    found = []
    for k, row in enumerate(rewards):
        rollouts = []
        for i, reward in enumerate(row):
            ids = draw(2 + (3 * i + k) % 5)
            logprobs = tuple(-4.8 - 0.05 * (t % 5) for t in ids)
            completion = Completion(ids, logprobs, "stop", 0)
            rollouts.append(Rollout(f"t#{k}", i, 6, completion, Action(text="x"), Verdict(reward, "x")))
        found.append(rollouts)
    return states, found


def run(folder: Path, parallel: Parallel, budget: int) -> dict[str, Any]:
    """Reports of every case, one after another on the same policy, so that a difference of weights shows, too."""
    settings = Optimizer(1e-3, tokens_per_microbatch=budget, epsilon=1e-4)  # a step is smooth in the gradient
    precision = Precision(policy="fp32")
    policy = MegatronPolicy.load(folder, parallel, precision, settings, 64, 10_000, seed=0, keep_reference=True)
    reports = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, algorithm in cases():
            cfg = Config(algorithm=algorithm, precision=precision)
            cfg.sampling.max_new_tokens, cfg.sampling.temperature = 8, 0.8
            batch = make_batch(*groups(), algorithm)
            reports[name], _ = update(policy, batch, cfg, 0, NonFiniteSteps(Path(scratch), 1))
    return {"reports": reports, "weights": {n: t.clone() for n, t in policy.hf_weights()}}


def compare(got: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    for name, report in got["reports"].items():
        for key in COMPARED:
            a, b = report.get(key), wanted["reports"][name].get(key)
            assert (a is None) == (b is None), f"{what}, {name}: {key} {a} {b}"
            if a is not None:
                assert abs(a - b) < 2e-4 * max(0.05, abs(b)), f"{what}, {name}: {key} {a} {b}"
    far = {n: (t - wanted["weights"][n]).abs().max().item() for n, t in got["weights"].items()}
    worst = max(far, key=lambda n: far[n])
    if dist.get_rank() == 0:
        print(f"{what}: weights after {len(got['reports'])} steps {far[worst]:.1e} ({worst})", flush=True)
    assert far[worst] < 2e-5, f"{what}: {worst}"


def main(folder: Path, file: Path, world: int) -> None:
    torch.set_num_threads(1)
    if world == 1:
        torch.save(run(folder, Parallel(), 10_000), file)
    else:
        wanted = torch.load(file, weights_only=False)
        layouts = (("DP 2", Parallel(), 23), ("TP 2", Parallel(tensor=2), 40), ("CP 2", Parallel(context=2), 31))
        for what, parallel, budget in layouts:
            compare(run(folder, parallel, budget), wanted, what)
            shutdown_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
