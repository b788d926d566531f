"""Typed schema of the whole configuration. `conf/` fills it; `pivotrl.configuration` composes and validates it.

Numbers carry their unit in the name. `None` means "off" or "derive", as each comment says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pivotrl.config_cluster import Cluster


@dataclass
class Trajectories:
    path: str | None = None  # file, folder or glob; None: the expert of `environment.name` makes them
    format: str = "auto"  # a reader's name, or "auto"
    tasks: int = 240  # expert runs to make when `path` is None
    runs_per_task: int = 1
    warmup_fraction: float = 0.2  # of the tasks; SFT that gives pi_0 format ability
    validation_fraction: float = 0.1  # of the tasks; held out from warm-up and training
    min_reward: float | None = None  # drop trajectories whose recorded reward is lower (needs meta.reward)
    drop: list[str] = field(default_factory=list)  # leave out turns with a flag of `trajectories.flags`
    deduplicate: bool = True  # of turns with equal state and action, in whatever trajectories, keep the first


@dataclass
class Model:
    name: str = "smollm2_135m"
    path: str = "builtin:smollm2-135m"  # Hugging Face folder, or builtin:NAME for one that a package ships
    chat_template: str | None = None  # None: the model's own; "hermes": the declared template with tools
    context_length: int = 2048  # tokens, prompt and completion together


@dataclass
class Rendering:
    workers: int = 0  # processes that render many prompts; 0: the CPUs of this process, shared among local ranks
    cache: bool = True  # keep rendered prompts in run_dir/prompts, for later stages and resumed runs


@dataclass
class VerifierConfig:
    name: str = "tool_calls"
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 0  # processes that verify, for verifiers that wait or may hang; 0: in this process, no time-out
    timeout_seconds: float = 30.0  # of one verdict in a worker; past it the rollout is unscorable


@dataclass
class Domain:
    name: str = "conversational_tool_use"
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    action_format: str = "hermes"  # how completions write tool calls


@dataclass
class Environment:
    name: str | None = None  # None: no environment; evaluation is then on held-out turns
    families: list[str] | None = None  # only tasks of these families; None: all
    max_turns: int = 12  # assistant turns of an episode
    options: dict[str, Any] = field(default_factory=dict)  # of the environment's class (docs/environment.md)


@dataclass
class Parallel:
    """Sizes of the megatron-core groups; data parallel is what remains of the world size."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False  # sequence parallel; required by megatron-core for MoE with tensor > 1
    # Layers of the first and last pipeline stage, where they have fewer than the others; None: as many as each other.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    # Model chunks of a pipeline stage (interleaved schedule): the bubble shrinks by it, activations in flight grow.
    virtual_pipeline: int = 1


@dataclass
class Experts:
    """Routers of a mixture of experts in training."""

    train_router: bool = True  # False: router weights stay those of the start policy
    router_dtype: str = "fp32"  # "fp32" | "fp64": scores of the routers
    replay: bool = False  # train with the choices of the generator's routers; needs generation.routed_experts
    aux_loss: float = 0.0  # coefficient of the load-balancing loss of each layer (NVIDIA: 0 or 1e-4); it is no reward


@dataclass
class Precision:
    policy: str = "bf16"  # "fp32" | "bf16": compute and parameter dtype; main weights and Adam are always float32
    # "fp32" | "bf16" | "fp8": linear layers of the engine in FP8 blocks of 128 x 128, quantised anew at each refit
    engine: str = "bf16"
    # Linear layers in FP8 by a recipe of Transformer Engine: "delayed" | "tensorwise" | "blockwise" (from Hopper on) |
    # "mxfp8" (Blackwell). Embedding, head, routers, norms and attention stay in bf16 (routers as experts.router_dtype).
    fp8: str | None = None
    fp8_first_layers_bf16: int = 0  # layers at either end that stay in bf16 as well
    fp8_last_layers_bf16: int = 0


@dataclass
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128


@dataclass
class Generation:
    max_sequences: int = 128  # in flight in one engine
    kv_cache_gib: float = 1.0  # CPU builds; GPUs use gpu_memory_utilization
    gpu_memory_utilization: float = 0.6
    server: str | None = None  # URL of a vLLM server that serves pi_0; None: an engine here
    weight_transfer: str = "nccl"  # how training renews a server's weights: "nccl" | "file" (docs/generation.md)
    tensor_parallel: int = 1
    expert_parallel: bool = False  # over the same ranks: each serves whole experts, instead of a part of every expert
    enforce_eager: bool = True
    verify_refit: str = "always"  # "always" | "every_n" | "off": compare what the engine serves with what was sent
    verify_every: int = 10  # n of "every_n"; names, shapes and finiteness are checked at each refit in any case
    routed_experts: bool = False  # completions carry the experts that each token was routed to
    max_mismatch: float | None = None  # mean |trainer - engine| log-prob; None: 1e-4 in fp32, 0.1 otherwise


@dataclass
class Adaptive:
    """Sequential profiling: turns whose verdict is near certain get no more rollouts."""

    enabled: bool = False
    error: float = 0.05  # 1 - agreement of the kept set with that of all K rollouts (errors over the sets' mean size)
    round: int = 1  # rollouts of an undecided turn at a time; more: fewer submissions, but turns stop later
    lambda_diff: float = 0.6  # decides membership of D_adv; keep it equal to select.lambda_diff
    # These many get all K rollouts. From them, and then from all turns before it, each wave of turns learns how turns
    # are distributed; a wave has as many turns as were known before it.
    calibration_turns: int = 128
    histogram: list[float] = field(default_factory=list)  # of an earlier profile's summary, instead of learning


@dataclass
class Profile:
    rollouts_per_turn: int = 8  # K
    max_turns: int | None = None  # profile at most this many turns (an even draw over trajectories); None: all
    second_rollouts: int = 0  # independent ones of every mixed turn: unbiased means of what is selected (0: off)
    # No rollouts: the pass rates that rows of NeMo-Gym pivot sets carry. They are of another policy, so `train` then
    # needs algorithm.allow_foreign_profile.
    from_rows: bool = False
    shard: str | None = None  # "i/n": the i-th (from 0) of n parts, for array jobs; "merge": join them
    adaptive: Adaptive = field(default_factory=Adaptive)


@dataclass
class Select:
    set: str = "adv"  # "cand" | "mixed" | "adv" | "adv_zeros" (method.md 1.2)
    lambda_diff: float = 0.6
    action_floor: float = 0.0  # of its share of the turns that an action gets among adv pivots, from other mixed turns
    allow_empty: bool = False
    domains: list[str] = field(default_factory=list)  # only turns of these; empty: of any
    tags: list[str] = field(default_factory=list)  # only turns with one of these (`trajectories.flags`, pivot_tags)
    drop_tags: list[str] = field(default_factory=list)  # no turn with any of these
    # Narrowing, in this order; all off by default.
    min_unique_actions: int = 1  # of a turn's rollouts; 1: any
    deduplicate: bool = False  # of turns with equal state, tools and demonstration keep one
    max_per_trajectory: int | None = None
    mixture: dict[str, int] = field(default_factory=dict)  # domain: exact number of pivots; empty: as they come
    max_pivots: int | None = None
    rank: str = "signal"  # which turns those limits prefer: "signal" (largest std, Theorem 3.2) | "random"


@dataclass
class Audit:
    """`pivotrl audit-verifier`: mutations of the demonstrated actions, scored by the domain's verifier."""

    max_turns: int | None = 500  # an even draw over trajectories; None: all
    accept_at: float = 0.5  # a reward from here on counts as accepted
    examples: int = 5  # wrong verdicts that are kept, for each kind of mutation
    truth: str = "auto"  # "auto" (execution where the turns can be executed) | an environment's name | "labels"


@dataclass
class Optimizer:
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: str = "constant"  # "constant" | "linear" (to zero at the last step)
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    tokens_per_microbatch: int = 4096  # unique tokens of the prefix trees of one forward
    max_nonfinite_steps: int = 3  # a step of non-finite loss or gradient is skipped; the run stops after that many
    overlap_grad_reduce: bool = False  # reduce gradients over data-parallel ranks while the backward goes on
    overlap_param_gather: bool = False  # gather updated weights while the next forward goes on; refits gather first
    cpu_offload: bool = False  # Adam's state is on the GPU only while a step is taken, never beside activations
    recompute: bool = False  # run each layer again in the backward: memory of layer inputs only, about a quarter slower


@dataclass
class Reprofile:
    """While training: profile again with the policy of that moment, and go on with the pivots that it has."""

    every_steps: int | None = None  # after so many steps on one set of pivots; None: not by steps
    below_mixed: float | None = None  # when the share of mixed groups, over `window` steps, is lower; None: not by it
    window: int = 10  # steps on the present pivots at least; the share is the mean over the last of them
    turns: int | None = None  # a new draw of this many profiled turns, kept and discarded alike; None: all


@dataclass
class Algorithm:
    steps: int = 20
    pivots_per_step: int = 8  # B
    group_size: int = 8  # G
    # Advantage. "group" (population mean and std, the paper) | "group_sample" (sample std) | "mean_only" (Dr.GRPO) |
    # "leave_one_out" (mean and std of the others, NVIDIA's practice) | "leave_one_out_mean" (RLOO)
    advantage: str = "group"
    std_epsilon: float = 1e-6
    invalid_action: str = "score"  # malformed actions: "score" (as verified) | "penalty" (a fixed advantage) | "mask"
    invalid_advantage: float = -5.0  # of "penalty"; takes no part in the group's mean and std
    overlong_filter: bool = False  # rollouts cut at max_new_tokens carry no loss; their reward stays in the group
    drop_uniform_groups: bool = False  # groups of equal rewards leave the denominator and the KL term as well
    # Which pivots. Dynamic sampling (DAPO): pivots whose group has equal rewards are replaced by the next ones, in at
    # most so many further submissions a step, and their groups leave the batch. 0: off
    dynamic_sampling: int = 0
    reprofile: Reprofile = field(default_factory=Reprofile)
    # Loss. "clip" (PPO's clipped surrogate) | "cispo" (clipped weight, no gradient cut) | "dpo" (pairs of a group)
    loss: str = "clip"
    ratio: str = "token"  # "token" | "sequence" (product over the action, eq. 7 as printed) | "geometric" (GSPO)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # > 1: bound on the ratio where the advantage is negative; None: off
    dpo_beta: float = 0.1  # of loss=dpo
    # Weight of a token, from the whole batch of one optimiser step: "token_mean" (DAPO) | "sequence_mean" (GRPO as
    # printed) | "sequence_sum" | "constant_length" (Dr.GRPO: sampling.max_new_tokens) | "group_mean"
    aggregation: str = "token_mean"
    kl_beta: float = 0.0  # KL to pi_0; 0: none
    kl_in: str = "loss"  # "loss" | "reward" (summed over the action, before the baseline)
    kl_estimator: str = "k3"  # "k1" | "k2" | "k3" | "unbiased" (k3 times the ratio: its gradient is that of the KL)
    reference_every: int = 0  # with kl_beta=0: measure KL and ratios to pi_0 every n steps (a forward); 0: never
    entropy_bonus: float = 0.0
    # Trainer / generator probability of what was sampled. "none" | "truncated" (clamped to [floor, cap]) | "masked"
    # (tokens outside carry no loss) | "geometric" (actions outside carry none, the tokens of the rest are clamped)
    importance_correction: str = "none"
    importance_cap: float = 5.0
    importance_floor: float = 0.0
    importance_sequence_low: float = 0.999  # of "geometric": bounds on the geometric mean over an action
    importance_sequence_high: float = 1.002
    sequence_mismatch_limit: float | None = None  # mask actions whose mean exp|trainer - generator| is above; None: off
    one_step_off: bool = False  # generation.server samples step n + 1 beside the training of step n
    # One optimiser step a batch (1 and 1) is strictly on-policy: the ratio is 1 and no clip is ever active.
    epochs: int = 1  # passes over the batch of a step
    minibatches: int = 1  # optimiser steps of a pass, each on its own groups with its own denominator
    reward: str = "functional"  # "functional" (domain.verifier) | "strict" (equal to the demonstration, eq. 2)
    allow_foreign_profile: bool = False  # train on a profile made by another policy, template or verifier
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass
class Sft:
    steps: int | None = None  # None: as many optimiser steps as `algorithm.steps`; 0: the stage is a no-op
    trajectories_per_step: int = 16
    max_kl: float | None = None  # of `sft`: stop at this KL to pi_0 (per token, on its own profiled rollouts)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-5))


@dataclass
class Evaluate:
    tasks: int = 50  # environment test tasks, or held-out turns where there is no environment
    trials: int = 1  # sampled episodes a task, beside one greedy
    split: str = "test"  # "test" | "validation": held-out tasks of the train side, on which choices are made
    # Unrelated questions: a JSONL file, a folder or a glob; multiple choice, exact answers, instructions (by their
    # fields). None: skipped, said so.
    ood_path: str | None = None
    ood_rows: int = 100  # of each file
    ood_max_new_tokens: int = 128  # of answers that are generated
    drift: int = 0  # unrelated prompts, and profiled rollouts, on which KL to pi_0 and order are measured; 0: off
    policies: list[str] = field(default_factory=lambda: ["base", "sft", "pivotrl"])


@dataclass
class Watch:
    """Success of the policy while it trains, for curves against rollouts and seconds. Never changes the training."""

    every: int = 0  # steps between two looks, beside one before the first; 0: off
    tasks: int = 24
    split: str = "validation"  # as evaluate.split
    export_best: bool = False  # `train` and `e2e` export the step of highest success instead of the last


@dataclass
class EndToEnd:
    """The baseline of `pivotrl e2e`: GRPO on whole episodes. Loss, advantage and optimizer are those of `algorithm`."""

    steps: int = 20
    tasks_per_step: int = 4
    group_size: int = 8  # episodes of a task


@dataclass
class Benchmark:
    """A benchmark of the paper, driven through its own harness against a served checkpoint (docs/benchmarks.md)."""

    name: str | None = None  # tau2 | swe_bench | terminal_bench | browsecomp | lm_eval; None: `evaluate` as usual
    policy: str = "pivotrl"  # which of evaluate.policies is served, where base_url is null
    base_url: str | None = None  # of a served model (OpenAI-compatible, ends in /v1); None: it is served for the run
    model: str = "pivotrl"  # its name there
    api_key: str = "EMPTY"
    tasks: int | None = None  # how many; None: the whole benchmark
    trials: int = 3  # of a task, where the harness repeats (the paper's values are means of 3)
    concurrency: int = 8
    options: dict[str, Any] = field(default_factory=dict)  # of the harness; docs/benchmarks.md lists them
    max_hours: float = 24.0
    serve_arguments: list[str] = field(default_factory=list)  # further words for the server


@dataclass
class Tracking:
    wandb: str = "auto"  # "auto" (online with a key, else offline) | "online" | "offline" | "disabled"
    project: str = "pivotrl"
    name: str | None = None  # of the W&B run; None: that of run_dir, and the stage
    tensorboard: bool = False  # event files in <stage>/tensorboard as well (extra `tensorboard`)
    rollouts_every: int = 10  # steps between tables of rollouts in W&B; 0: none
    rollouts_shown: int = 8  # rows of such a table


@dataclass
class Checkpoint:
    """What training is resumed from, <stage>/state/, and when a run stops by itself. Never changes a result."""

    every_steps: int | None = None  # save after so many steps; None: by time alone
    every_minutes: float | None = 30.0  # save when so long has passed since the last; None: never by time
    keep_last: int = 1  # the newest ones; gone when the stage has finished
    keep_every: int | None = None  # save and keep for good every multiple of so many steps
    keep_best: int = 0  # of those saved, for good: highest success if watched, or reward; lowest loss (sft)
    asynchronous: bool | None = None  # write beside the next steps, from a copy in memory; None: where there are GPUs
    stop_after_minutes: float | None = None  # save and stop, counted from the job's start; None: no such limit
    stop_before_end_minutes: float | None = 5.0  # save and stop before SLURM ends the job
    grace_seconds: float = 120.0  # after a signal, `pivotrl run` waits so long for the stage to save
    watchdog_minutes: float | None = 60.0  # without progress: stacks of all ranks, exit code 3; None: off


@dataclass
class Run:
    stages: list[str] = field(
        default_factory=lambda: ["turns", "warmup", "profile", "select", "train", "sft", "evaluate", "report"]
    )
    accept_upgrade: bool | None = None  # go on with what another version of PivotRL made; null: ask, false: make again


@dataclass
class Config:
    run_dir: str = "runs/default"
    seed: int = 0
    trajectories: Trajectories = field(default_factory=Trajectories)
    model: Model = field(default_factory=Model)
    rendering: Rendering = field(default_factory=Rendering)
    domain: Domain = field(default_factory=Domain)
    environment: Environment = field(default_factory=Environment)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    experts: Experts = field(default_factory=Experts)
    sampling: Sampling = field(default_factory=Sampling)
    generation: Generation = field(default_factory=Generation)
    profile: Profile = field(default_factory=Profile)
    select: Select = field(default_factory=Select)
    audit: Audit = field(default_factory=Audit)
    algorithm: Algorithm = field(default_factory=Algorithm)
    warmup: Sft = field(default_factory=lambda: Sft(steps=0))
    sft: Sft = field(default_factory=Sft)
    end_to_end: EndToEnd = field(default_factory=EndToEnd)
    watch: Watch = field(default_factory=Watch)
    evaluate: Evaluate = field(default_factory=Evaluate)
    benchmark: Benchmark = field(default_factory=Benchmark)
    tracking: Tracking = field(default_factory=Tracking)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster = field(default_factory=Cluster)
    run: Run = field(default_factory=Run)
