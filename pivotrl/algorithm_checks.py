"""Conflicts within the algorithm: options that cannot be had together, or that would silently do nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pivotrl.config import Algorithm, Config, Sampling

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("group", "group_sample", "mean_only", "leave_one_out", "leave_one_out_mean"),
    "algorithm.invalid_action": ("score", "penalty", "mask"),
    "algorithm.loss": ("clip", "cispo", "dpo"),
    "algorithm.ratio": ("token", "sequence", "geometric"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "sequence_sum", "constant_length", "group_mean"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "unbiased"),
    "algorithm.importance_correction": ("none", "truncated", "masked", "geometric"),
}
POSITIVE = (
    "algorithm.steps",
    "algorithm.pivots_per_step",
    "algorithm.std_epsilon",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.dpo_beta",
    "algorithm.importance_cap",
    "algorithm.epochs",
    "algorithm.minibatches",
    "algorithm.reprofile.every_steps",
    "algorithm.reprofile.window",
    "algorithm.reprofile.turns",
)
NOT_NEGATIVE = (
    "algorithm.kl_beta",
    "algorithm.entropy_bonus",
    "algorithm.reference_every",
    "algorithm.importance_floor",
    "algorithm.importance_sequence_low",
    "algorithm.dynamic_sampling",
)


def algorithm_conflicts(a: Algorithm) -> Iterator[str]:
    """Every conflict within `a` (choices and plain ranges are checked by the tables above)."""
    yield from _loss(a)
    yield from _kl(a)
    yield from _importance(a)
    yield from _pivots(a)
    if a.loss == "dpo":
        yield from _dpo(a)
    if a.invalid_action == "penalty" and a.invalid_advantage >= 0:
        yield f"algorithm.invalid_advantage={a.invalid_advantage} must be negative to be a penalty"
    if a.minibatches > a.pivots_per_step:
        yield (
            f"algorithm.minibatches={a.minibatches} exceeds algorithm.pivots_per_step={a.pivots_per_step}: "
            "a group is never split, so some mini-batches would be empty"
        )


def sampling_conflicts(sampling: Sampling) -> Iterator[str]:
    """What training asks of the sampling: the trainer's log-probs are over the whole vocabulary."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield (
            f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: training needs top_p=1 and top_k=0, since the "
            "engine's log-probs are then of a cut distribution, which the trainer's cannot agree with"
        )


def _loss(a: Algorithm) -> Iterator[str]:
    if a.clip_low > 1 or (a.clip_low == 1 and a.loss != "cispo"):
        yield (
            f"algorithm.clip_low={a.clip_low} must be below 1 (the ratio is clipped at 1 - clip_low; "
            "with loss=cispo 1 means no lower bound)"
        )
    if a.dual_clip is not None and a.dual_clip <= 1:
        yield f"algorithm.dual_clip={a.dual_clip} must be above 1 (it bounds the ratio where advantages are negative)"
    if a.loss == "cispo" and a.dual_clip is not None:
        yield "algorithm.dual_clip bounds the clipped surrogate; loss=cispo bounds the weight by clip_high (use null)"
    if a.loss == "cispo" and a.ratio != "token":
        yield f"algorithm.ratio={a.ratio}: loss=cispo weighs each token by its own ratio (use ratio=token)"
    if a.loss == "clip" and a.ratio == "sequence" and a.aggregation != "sequence_mean":
        yield (
            f"algorithm.aggregation={a.aggregation}: ratio=sequence gives one term an action, which only "
            "aggregation=sequence_mean counts once (others would multiply it by the length)"
        )


def _kl(a: Algorithm) -> Iterator[str]:
    if a.kl_in == "reward" and a.kl_beta == 0:
        yield "algorithm.kl_in=reward does nothing with algorithm.kl_beta=0 (set kl_beta, or kl_in=loss)"
    if a.kl_in == "reward" and a.kl_estimator == "unbiased":
        yield (
            "algorithm.kl_estimator=unbiased is about the gradient of a KL in the loss, and a reward has none "
            "(with kl_in=reward use k1: it is unbiased there)"
        )


def _importance(a: Algorithm) -> Iterator[str]:
    if a.importance_correction != "none":
        if a.importance_cap < 1:
            yield f"algorithm.importance_cap={a.importance_cap} must be >= 1 (equal policies have ratio 1)"
        if a.importance_floor > 1:
            yield f"algorithm.importance_floor={a.importance_floor} must be <= 1 (equal policies have ratio 1)"
    elif a.importance_floor > 0:
        yield f"algorithm.importance_floor={a.importance_floor} does nothing with importance_correction=none"
    if not a.importance_sequence_low <= 1 <= a.importance_sequence_high:
        yield (
            f"algorithm.importance_sequence_low={a.importance_sequence_low}, "
            f"importance_sequence_high={a.importance_sequence_high}: 1, the ratio of equal policies, must lie between"
        )
    if a.sequence_mismatch_limit is not None and a.sequence_mismatch_limit <= 1:
        yield (
            f"algorithm.sequence_mismatch_limit={a.sequence_mismatch_limit} must be above 1 "
            "(the mean of exp|difference|, which is 1 for equal policies)"
        )


def _pivots(a: Algorithm) -> Iterator[str]:
    r = a.reprofile
    if r.below_mixed is not None and not 0 < r.below_mixed <= 1:
        yield f"algorithm.reprofile.below_mixed={r.below_mixed} is a share of groups: it must be in (0, 1]"
    if r.turns is not None and r.every_steps is None and r.below_mixed is None:
        yield (
            f"algorithm.reprofile.turns={r.turns} does nothing without algorithm.reprofile.every_steps or "
            "algorithm.reprofile.below_mixed"
        )


def _dpo(a: Algorithm) -> Iterator[str]:
    """DPO compares actions of a group with each other: it has no advantage, ratio or token weight."""
    wrong = {
        "kl_beta": (a.kl_beta, 0),  # its own pull to pi_0 is dpo_beta
        "entropy_bonus": (a.entropy_bonus, 0),
        "ratio": (a.ratio, "token"),
        "dual_clip": (a.dual_clip, None),
        "importance_correction": (a.importance_correction, "none"),
        "sequence_mismatch_limit": (a.sequence_mismatch_limit, None),
        "drop_uniform_groups": (a.drop_uniform_groups, False),
    }
    for key, (value, needed) in wrong.items():
        if value != needed:
            yield f"algorithm.{key}={value} has no place in loss=dpo (use {'null' if needed is None else needed})"
    if a.invalid_action == "penalty":
        yield "algorithm.invalid_action=penalty sets an advantage, and loss=dpo has none (use score or mask)"


def one_step_off_conflicts(cfg: Config) -> Iterator[str]:
    """What sampling beside the update asks for."""
    a = cfg.algorithm
    if not a.one_step_off:
        return
    if cfg.generation.server is None:
        yield (
            "algorithm.one_step_off=true needs generation.server: in one process engine and trainer take turns on the "
            "same accelerators, so that nothing would run beside the update"
        )
    if a.importance_correction == "none":
        yield (
            "algorithm.one_step_off=true needs algorithm.importance_correction (truncated, masked or geometric): "
            "rollouts are of the weights before the last update, and only the correction makes up for that"
        )
    if a.reprofile.every_steps is not None or a.reprofile.below_mixed is not None:
        yield (
            "algorithm.one_step_off=true: the next step's pivots are drawn before a re-profile could renew them "
            "(use algorithm.reprofile.every_steps=null below_mixed=null)"
        )
    if cfg.experts.replay:
        yield (
            "algorithm.one_step_off=true with experts.replay=true: a run that continues takes its next rollouts from "
            "train/rollouts.jsonl, which does not keep the experts of each token"
        )
