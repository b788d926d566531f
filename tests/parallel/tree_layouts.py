"""Run under torchrun by test_tree_layouts.py: in every layout the tree computes what separate sequences do.

Arguments: folder with models. Both sides run in the same layout, so that a difference can come from sharing alone (that
layouts equal Hugging Face is layouts.py's). Prints one line a case; a difference ends with a non-zero status.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.prefix_tree_side import side_by_side  # noqa: E402
from pivotrl.config import Optimizer, Parallel, Precision  # noqa: E402
from pivotrl.policy import policy as policy_module  # noqa: E402
from pivotrl.policy.distributed import shutdown_groups  # noqa: E402
from pivotrl.policy.policy import MegatronPolicy, Objective, PairBatch  # noqa: E402
from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree  # noqa: E402
from pivotrl.training.objective import SftObjective, token_weights  # noqa: E402

TEMPERATURE = 0.8
VOCABULARY = 203  # odd: padded over two ranks
SP = Parallel(tensor=2, sequence=True)

# With four processes: what is not named is data parallel. (model, layout, activation recompute)
CASES: list[tuple[str, Parallel, bool]] = [
    ("llama", Parallel(), True),
    ("llama", Parallel(tensor=2), False),
    ("llama", Parallel(pipeline=2), True),
    ("llama", Parallel(context=2), True),
    ("qwen3_moe", replace(SP, expert=2), False),
    ("qwen3_moe", replace(SP, expert_tensor=2), False),
    ("qwen3_moe", replace(SP, pipeline=2), True),
    ("qwen3_moe", Parallel(context=2, expert=2), True),
    ("nemotron_h", replace(SP, expert=2), True),
    ("nemotron_h", replace(SP, context=2), False),
]


def unusual() -> list[TokenSequence]:
    """Tries of every odd kind, in one batch."""
    return [
        *(TokenSequence.of(range(n), [100 + n, n]) for n in range(1, 40)),  # deep: a branch at every token
        TokenSequence.of([150, 151], [152, 153]),  # a prompt that is a prefix of another
        TokenSequence.of([150, 151, 152], [153, 154, 155]),
        TokenSequence.of([150], [151]),
        *(TokenSequence.of([160, 161, 162], [g]) for g in range(8)),  # one-token actions
        *(TokenSequence((170 + g, 1, 2), (1, 2)) for g in range(6)),  # no trunk
        *(TokenSequence.of([199] * 10, [g + 2] * (1 + g % 5)) for g in range(200)),  # 200 branches
        TokenSequence.of([199] * 10, [5, 5, 5]),  # one of them twice
    ]


def trajectories() -> list[TokenSequence]:
    """SFT: the turns of three trajectories that begin with one system prompt."""
    draw = np.random.default_rng(0)
    system = draw.integers(0, VOCABULARY, 12).tolist()
    found = []
    for _ in range(3):
        ids = system + draw.integers(0, VOCABULARY, 30).tolist()
        found += [TokenSequence.of(ids[:a], ids[a : a + 4]) for a in (18, 26, 38)]
    return found


def weighted(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Another weight for every pair, so that a mixed-up pair shows; divided by the one denominator."""
    weight = (0.5 + (pairs.sequence * 7 + pairs.offset * 3) % 11 * 0.1) / 900.0
    return -(weight * logprobs).sum() - 1e-4 * entropy.sum(), {}


Batch = tuple[list[TokenSequence], Objective]


def batches() -> dict[str, Batch]:
    turns = trajectories()
    mean = torch.tensor(token_weights([len(s.targets) for s in turns], "token_mean"))
    return {"unusual": (unusual(), weighted), "sft": (turns, SftObjective(mean))}


@contextmanager
def trees(build: Callable[..., PrefixTree]) -> Iterator[None]:
    with mock.patch.object(policy_module, "build_tree", build):
        yield


def numbered(*arguments: Any) -> PrefixTree:
    """A tree with row numbers for depths."""
    tree = build_tree(*arguments)
    return replace(tree, position_ids=np.arange(len(tree.position_ids)))


def seen_by_siblings(*arguments: Any) -> PrefixTree:
    """A tree whose branches see one another: a plain causal row of tokens."""
    tree = build_tree(*arguments)
    chain = build_tree([TokenSequence(tuple(range(len(tree.token_ids))), ())])
    return replace(tree, chains=chain.chains, subtree_end=chain.subtree_end)


def load(folder: Path, parallel: Parallel, recompute: bool) -> MegatronPolicy:
    """A step of this policy is linear in the gradient."""
    settings = Optimizer(1e8, epsilon=1e8, tokens_per_microbatch=600, clip_grad=1e9, recompute=recompute)
    return MegatronPolicy.load(folder, parallel, Precision(policy="fp32"), settings, 64, 4, seed=0)


def step(policy: MegatronPolicy, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    """(log-probs, weights after a step, report)."""
    logprobs = policy.logprobs(batch[0], TEMPERATURE)
    report = policy.train_step(*batch, TEMPERATURE)
    return logprobs, {n: t.clone() for n, t in policy.hf_weights()}, report


def apart(one: list[Tensor], two: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, two, strict=True) if len(a))


def check(folder: Path, name: str, parallel: Parallel, recompute: bool) -> None:
    for kind, batch in batches().items():
        policy = load(folder / name, parallel, recompute)
        wrong = []
        # a hybrid's attention knows no positions
        controls = (seen_by_siblings,) if name == "nemotron_h" else (numbered, seen_by_siblings)
        for control in controls if kind == "unusual" else ():
            with trees(control):
                wrong.append(policy.logprobs(batch[0], TEMPERATURE))
        got, after, report = step(policy, batch)
        with trees(side_by_side):
            wanted, flat, separate = step(load(folder / name, parallel, recompute), batch)
        near, far = apart(got, wanted), {n: (after[n] - t).abs().max().item() for n, t in flat.items()}
        worst = max(far, key=lambda n: far[n])
        saved = separate["tokens_unique"] / report["tokens_unique"]
        losses = report["loss"], separate["loss"]
        noticed = [round(apart(w, wanted), 2) for w in wrong]
        what = f"{kind}: {name} {parallel} recompute={recompute}"
        if dist.get_rank() == 0:
            print(f"log-probs {near:.1e}, gradients {far[worst]:.1e} ({worst}), controls {noticed}: {what}", flush=True)
        assert separate["tokens_unique"] == report["tokens_total"] and saved > 1.3, f"{what}: {saved}"
        assert near < 5e-6 and far[worst] < 1e-6, f"{what}: {worst}"
        assert abs(losses[0] / losses[1] - 1) < 1e-5, f"{what}: {losses}"
        assert all(c > 0.1 for c in noticed), f"{what}: a control is not noticed, {noticed}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, parallel, recompute in CASES:
        check(folder, name, parallel, recompute)
        shutdown_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
