"""The update on the real policy, and the engine after it: what is refitted, and at which version."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pivotrl.config import Config, Optimizer, Parallel, Precision
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.engine import Completion
from pivotrl.policy.head import target_logprobs
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.rollouts import Rollout
from pivotrl.training.batch import Batch, make_batch
from pivotrl.training.grpo import learn
from pivotrl.training.handover import Handover
from pivotrl.training.nonfinite import NonFiniteError, NonFiniteSteps
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict

Folders = dict[str, tuple[Path, Any]]


class Counter(StatefulEngine):
    """An engine that remembers the versions it was given; it scores the canary as the policy does."""

    def __init__(self, policy: MegatronPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.versions: list[int] = []

    def _sleep(self, discard_weights: bool) -> None:
        pass

    def _wake(self) -> None:
        pass

    def _load(self, weights: Iterable[Any], version: int) -> None:
        for _ in weights:
            pass
        self.versions.append(version)

    def score(self, prompts: Any, continuations: Any) -> list[list[float]]:
        rows = [TokenSequence.of(p, c) for p, c in zip(prompts, continuations, strict=True)]
        return [x.tolist() for x in self.policy.logprobs(rows, 1.0)]


class Bench:
    """One policy with its engine, step after step."""

    def __init__(self, folder: Path, cfg: Config, directory: Path) -> None:
        self.policy, self.cfg = load(folder), cfg
        self.engine, self.handover = Counter(self.policy), Handover(self.policy)
        self.nonfinite = NonFiniteSteps(directory, 2)

    def learn(self, made: Batch, step: int) -> dict[str, float]:
        self.handover.generate(self.engine, lambda: None)  # type: ignore[arg-type]
        return learn(self.policy, self.engine, self.handover, made, self.cfg, step, self.nonfinite)  # type: ignore[arg-type]


def load(folder: Path) -> MegatronPolicy:
    settings = Optimizer(1e-3, tokens_per_microbatch=40)
    return MegatronPolicy.load(
        folder, Parallel(), Precision(policy="fp32"), settings, 64, 10, seed=0, keep_reference=True
    )


def batch(policy: MegatronPolicy, cfg: Config, rewards: list[list[float]]) -> Batch:
    """Rollouts whose log-probs are the trainer's own, as of an engine that agrees."""
    g = torch.Generator().manual_seed(2)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 128, (n,), generator=g).tolist())

    states: list[Any] = [SimpleNamespace(prompt_ids=draw(5)) for _ in rewards]
    ids = [[draw(3 + i) for i in range(len(row))] for row in rewards]
    blank = [[(0.0,) * len(x) for x in row] for row in ids]

    def made(logprobs: list[list[tuple[float, ...]]]) -> Batch:
        groups = [
            [
                Rollout(f"t#{k}", i, 5, Completion(ids[k][i], logprobs[k][i], "stop", 0), Action("x"), Verdict(r, "x"))
                for i, r in enumerate(row)
            ]
            for k, row in enumerate(rewards)
        ]
        return make_batch(states, groups, cfg.algorithm)

    values = iter(policy.logprobs([r.sequence for r in made(blank).rollouts], cfg.sampling.temperature))
    return made([[tuple(next(values).tolist()) for _ in row] for row in rewards])


def config(**changes: Any) -> Config:
    cfg = Config(precision=Precision(policy="fp32"))
    for key, value in changes.items():
        setattr(cfg.algorithm, key, value)
    return cfg


def test_the_engine_follows_every_step(tiny_folders: Folders, tmp_path: Path) -> None:
    cfg = config(kl_beta=0.05)
    bench = Bench(tiny_folders["llama"][0], cfg, tmp_path)
    stats = bench.learn(batch(bench.policy, cfg, [[1, 0, 0], [1, 1, 1]]), 0)
    assert (bench.engine.weight_version, bench.engine.versions) == (1, [1])
    assert stats["mismatch_abs"] < 1e-5
    assert stats["canary_mismatch"] < 1e-5
    assert stats["importance_ess"] == pytest.approx(1.0, abs=1e-4)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["tokens_saved"] > 0 and stats["seconds_refit"] > 0 and "mfu" not in stats
    cfg.algorithm.kl_beta = 0.0
    before = [p.detach().clone() for p in bench.policy.model.parameters()]
    stats = bench.learn(batch(bench.policy, cfg, [[1, 1], [0, 0]]), 1)
    assert (stats["skipped"], bench.engine.versions) == (1.0, [1, 2])  # it slept: the same weights come back
    assert all(torch.equal(a, b) for a, b in zip(before, bench.policy.model.parameters(), strict=True))
    assert "canary_mismatch" not in stats  # of the first refit only


def test_broken_weights_are_told_with_samples(tiny_folders: Folders, tmp_path: Path) -> None:
    cfg = config()
    bench = Bench(tiny_folders["llama"][0], cfg, tmp_path)
    bench.learn(batch(bench.policy, cfg, [[1, 0]]), 0)
    mixed = batch(bench.policy, cfg, [[1, 0, 0]])
    with torch.no_grad():
        next(bench.policy.model.parameters())[mixed.rollouts[1].sequence.token_ids[-2]] = float("nan")
    stats = bench.learn(mixed, 1)
    assert (stats["nonfinite"], stats["skipped"]) == (1.0, 1.0)
    with pytest.raises(NonFiniteError, match=r"t#0/1"):
        bench.learn(mixed, 2)


def test_log_probs_are_those_at_the_sampling_temperature(tiny_folders: Folders) -> None:  # field report B1
    from megatron.core import parallel_state

    load(tiny_folders["llama"][0])  # makes the groups
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, head = torch.ones(1, 1), torch.tensor([[2.0], [0.0]])  # logits [2, 0]
    pairs = torch.tensor([0, 0]), torch.tensor([0, 1])
    logprobs, _ = target_logprobs(hidden, head, *pairs, 0.5, group)
    torch.testing.assert_close(logprobs, torch.tensor([-0.01815, -4.01815]), rtol=0, atol=1e-5)
