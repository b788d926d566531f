"""`MegatronPolicy`: the trainable policy on megatron-core. One source for one CPU process and for clusters.

Every rank is given the same list of sequences; the policy splits it over data-parallel ranks. Losses are sums over
micro-batches and ranks of what the objective returns, so the objective holds the one global denominator and the
gradient does not depend on how the batch was cut (design idea 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from pivotrl import fp8
from pivotrl.config import Experts, Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.models.dims import Dims
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import Entry
from pivotrl.models.registry import family_for
from pivotrl.models.rope import Rope
from pivotrl.policy import cpu_shim, distributed
from pivotrl.policy.experts import Routers
from pivotrl.policy.machine import this_machine
from pivotrl.policy.memory import reused
from pivotrl.policy.model import PolicyModel, build_chunks, transformer_config
from pivotrl.policy.offload import TrainerMemory
from pivotrl.policy.optimizer import data_parallel, make_optimizer, parameter_groups
from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree, schedule
from pivotrl.policy.refit import RefitSource
from pivotrl.policy.schedule import learning_rate
from pivotrl.policy.weights import full_weights, load_weights, set_constants, write_folder
from pivotrl.refit.execute import Shard
from pivotrl.refit.layout import EngineLayout

EVALUATION_TOKENS = 4096  # unique tokens of a forward without gradient, for a policy that has no optimizer


@dataclass(frozen=True)
class PairBatch:
    """Which target element k of a micro-batch's log-probs is: number `offset[k]` of `sequences[sequence[k]]`."""

    sequence: Tensor  # [P] int64, index in the list given to train_step
    offset: Tensor  # [P] int64
    tokens: Tensor  # [P] int64


Objective = Callable[[Tensor, Tensor, PairBatch], tuple[Tensor, dict[str, Tensor]]]


def _combine(key: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    if key.endswith("_max"):
        return value if math.isnan(value) else max(before, value)
    return before + value


class MegatronPolicy:
    """A causal language model on megatron-core: log-probs, training steps, weights under Hugging Face names."""

    def __init__(
        self,
        chunks: list[PolicyModel],
        dims: Dims,
        table: dict[str, Entry],
        seed: int,
        experts: Experts,
        constants: dict[str, Tensor] | None = None,
    ) -> None:
        self.chunks, self.dims, self.table, self.seed = chunks, dims, table, seed
        self.constants = constants or {}  # by Hugging Face name, float32: an engine serves them, too
        self.settings: Optimizer | None = None
        self.total_steps = 0
        self.step = 0  # train_step calls so far; drives the schedule
        self.optimizer: Any = None
        config = chunks[0].config
        self.wrapped: list[Any] = [Float16Module(config, c) if config.bf16 else c for c in chunks]
        self._reference: list[Tensor] | None = None
        self.refit_source = RefitSource(chunks, dims, table)
        moe = tuple(dims.kind(i) == "moe" for i in range(dims.layers))
        self.routers = Routers(chunks, moe, experts)
        self._replay = True
        self._gathering = False  # a step was taken whose weights are gathered by the next forward

    @property
    def model(self) -> PolicyModel:
        """The whole model of this rank where it has one chunk; the first chunk with virtual pipeline stages."""
        return self.chunks[0]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter of this rank."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @classmethod
    def load(
        cls,
        model_dir: Path,
        parallel: Parallel,
        precision: Precision,
        optimizer: Optimizer | None,
        max_length: int,
        total_steps: int,
        seed: int,
        keep_reference: bool = False,
        experts: Experts | None = None,
    ) -> MegatronPolicy:
        """Build the policy of a Hugging Face folder in this process's place of the parallel layout.

        Args: `optimizer` None gives a policy for log-probs only; `max_length` in tokens; `total_steps` is the
        schedule's; `keep_reference` keeps a CPU copy of these weights for `reference()`; `experts`
        settings of the routers (default: trained).
        Raises UserError for a model, layout or precision that cannot be had.
        """
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        if precision.policy not in dtypes:
            raise UserError(f"precision.policy: '{precision.policy}' is not known; use 'fp32' or 'bf16'")
        if precision.fp8 is not None and (problem := fp8.machine_problem(precision.fp8, this_machine())):
            raise UserError(problem)
        folder = ModelFolder(Path(model_dir))
        family = family_for(folder.config)
        dims = replace(family.dims(folder.config), mtp_kinds=())
        settings = family.to_megatron_kwargs(folder.config)
        if precision.fp8 is not None:
            found = list(fp8.conflicts(precision, dims.layers, parallel))
            if found := found + list(fp8.size_problems(precision.fp8, dims, parallel)):
                raise UserError("; ".join(found))
        rope = Rope.of(folder.config)
        rope.check(max_length)
        distributed.initialise(parallel)
        torch.manual_seed(seed)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(seed)
        recompute = optimizer is not None and optimizer.recompute
        config = transformer_config(settings, dims, parallel, dtypes[precision.policy], recompute, experts, precision)
        with cpu_shim.scope():
            chunks = build_chunks(config, dims, rope, max_length)
        table, constants = load_weights(chunks, folder, family, dims)
        if torch.cuda.is_available():
            for chunk in chunks:
                chunk.cuda()
        policy = cls(chunks, dims, table, seed, experts or Experts(), constants)
        set_constants(chunks, family, dims, constants)  # now: a bf16 wrapper has cast every buffer
        if keep_reference:
            policy._reference = [p.detach().cpu().clone() for p in policy.parameters()]
        if optimizer is not None:
            policy._make_trainable(optimizer, total_steps)
        return policy

    @cpu_shim.on_cpu
    def _make_trainable(self, settings: Optimizer, total_steps: int) -> None:
        config = self.model.config
        learning_rate(settings, 0, total_steps)  # refuses an unknown schedule now
        self.settings, self.total_steps = settings, total_steps
        self.wrapped = data_parallel(self.wrapped, settings)
        self.optimizer = make_optimizer(self.wrapped, settings)

        # sums, not means: megatron-core would divide by a token count that the objective has already used
        def finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
            finalize_model_grads(model, None, **kwargs)

        config.finalize_model_grads_func = finalize
        if settings.cpu_offload:
            self.memory.release("optimizer")

    @cached_property
    def memory(self) -> TrainerMemory:
        """What can be given back while the engine has the accelerator."""
        on_host = ("optimizer",) if self.settings is not None and self.settings.cpu_offload else ()
        return TrainerMemory(torch.nn.ModuleList(self.chunks), self.optimizer, on_host)

    def settle(self) -> None:
        """Bring every weight up to date that an overlapped gather has still to bring. All ranks call it."""
        if self._gathering:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
        self._gathering = False

    @cpu_shim.on_cpu
    @reused()
    def logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> list[Tensor]:
        """Log-probs at `temperature` of the targets of each sequence: float32 [targets], on CPU, on every rank."""
        starts = [0]
        for s in sequences:
            starts.append(starts[-1] + len(s.targets))
        flat = torch.zeros(starts[-1])
        begin = torch.tensor(starts)

        def keep(tree: PrefixTree, out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            where = begin[torch.from_numpy(tree.pair_sequence)] + torch.from_numpy(tree.pair_offset)
            flat[where] = out[0].detach().cpu()
            return out.sum() * 0.0, {}

        trees = self._trees(sequences)
        for chunk in self.wrapped:
            chunk.eval()
        with torch.no_grad():
            self._forward_backward(trees, temperature, keep, forward_only=True)
        flat = self._on_every_rank(flat)
        return list(flat.split([len(s.targets) for s in sequences]))

    @cpu_shim.on_cpu
    @reused()
    def train_step(
        self, sequences: Sequence[TokenSequence], objective: Objective, temperature: float
    ) -> dict[str, float]:
        """One optimiser step on the sum of the objective over all pairs of `sequences`.

        `objective(logprobs [P], entropy [P], pairs)` returns a scalar that is already divided by the global
        denominator, and metrics that are summed over micro-batches and ranks ("..._max": the maximum). Both come back
        with grad_norm, learning_rate, tokens_total, tokens_unique and skipped; a non-finite loss or gradient skips the
        optimiser step (skipped = 1.0) and leaves the weights as they were.
        """
        if self.optimizer is None or self.settings is None:
            raise RuntimeError("this policy was loaded without an optimizer")
        rate = learning_rate(self.settings, self.step, self.total_steps)
        for group in parameter_groups(self.optimizer):
            group["lr"] = rate
        trees = self._trees(sequences)
        for chunk in self.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_of(tree: PrefixTree, out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if not len(tree.pair_row):  # a micro-batch that only takes part in the collectives
                return out.sum() * 0.0, {}
            pairs = PairBatch(
                *(torch.from_numpy(x).to(out.device) for x in (tree.pair_sequence, tree.pair_offset, tree.pair_token))
            )
            loss, metrics = objective(out[0], out[1], pairs)
            return loss, {"loss": loss.detach(), **{k: v.detach() for k, v in metrics.items()}}

        balance = self._row_weight(trees) if self.routers.aux_loss else 0.0
        metrics = self._forward_backward(trees, temperature, loss_of, forward_only=False, balance=balance)
        sums = self._sum_metrics(metrics, trees)
        sums |= self.routers.take_load(next(self.model.parameters()).device)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm() or 0.0)
        skipped = not (math.isfinite(norm) and math.isfinite(sums.get("loss", 0.0)))
        if not skipped:
            with self.memory.stepping():
                self.optimizer.step()
            self._gathering = self.settings.overlap_param_gather
        self.step += 1
        return {**sums, "grad_norm": norm, "learning_rate": rate, "skipped": float(skipped)}

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, in the policy's dtype; every rank must consume all."""
        self.settle()
        return chain(full_weights(self.chunks, self.dims, self.table), self.constants.items())

    def weights_for(self, engine: EngineLayout) -> Iterator[tuple[str, Tensor | Shard]]:
        """(Hugging Face name, what this rank's engine serves of it), sent by plan; every rank must consume all."""
        self.settle()
        return chain(self.refit_source.stream(engine), self.constants.items())

    def save_hf(self, out_dir: Path, source_dir: Path, chat_template: str | None = None) -> None:
        """Write a Hugging Face folder whole or not at all; config and tokenizer are `source_dir`'s. All ranks call it.

        `chat_template`: the template that the policy was trained with, where it is not the folder's own.
        """
        extra = {} if chat_template is None else {"chat_template.jinja": chat_template}
        dtype = self.model.config.params_dtype
        self.settle()
        weights = full_weights(self.chunks, self.dims, self.table)
        write_folder(weights, self.table, Path(out_dir), Path(source_dir), dtype, extra, self.constants)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block the policy is pi_0, the weights that it was loaded with (for KL to the reference)."""
        if self._reference is None:
            raise RuntimeError("no reference weights: load the policy with keep_reference=True")
        self.settle()
        parameters = self.parameters()
        trained = [p.data for p in parameters]
        try:
            for p, initial in zip(parameters, self._reference, strict=True):
                p.data = initial.to(p.device)
            self._replay = False  # those choices are of another policy
            yield
        finally:
            self._replay = True
            for p, data in zip(parameters, trained, strict=True):
                p.data = data

    def _trees(self, sequences: Sequence[TokenSequence]) -> list[PrefixTree]:
        """This data-parallel rank's micro-batches; as many on every rank."""
        budget = self.settings.tokens_per_microbatch if self.settings else EVALUATION_TOKENS
        c = self.model.config
        # an interleaved schedule takes micro-batches in groups of as many as there are stages
        rounds = c.pipeline_model_parallel_size if len(self.chunks) > 1 else 1
        plans = schedule(sequences, budget, groups.get_data_parallel_world_size(), rounds)
        sizes = Parallel(c.tensor_model_parallel_size, context=c.context_parallel_size, sequence=c.sequence_parallel)
        multiple = fp8.row_multiple(sizes, c.fp8_recipe if c.fp8 else None)
        return [build_tree(sequences, batch, multiple) for batch in plans[groups.get_data_parallel_rank()]]

    def _row_weight(self, trees: list[PrefixTree]) -> float:
        """1 / unique tokens of the step, over all data-parallel ranks."""
        total = torch.tensor(float(sum(t.tokens_unique for t in trees)), device=next(self.model.parameters()).device)
        dist.all_reduce(total, group=groups.get_data_parallel_group())
        return 1.0 / max(1.0, total.item())

    def _forward_backward(
        self,
        trees: list[PrefixTree],
        temperature: float,
        loss_of: Callable[[PrefixTree, Tensor], tuple[Tensor, dict[str, Tensor]]],
        forward_only: bool,
        balance: float = 0.0,
    ) -> list[dict[str, Tensor]]:
        """Run megatron-core's schedule over the trees; metrics of the last pipeline stage, one dict a tree."""

        model_of = {id(wrapped): chunk for wrapped, chunk in zip(self.wrapped, self.chunks, strict=True)}

        def forward_step(iterator: Iterator[PrefixTree], wrapped: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            tree = next(iterator)
            out = model_of[id(wrapped)].run(wrapped, tree, temperature, self._replay, balance)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, metrics = loss_of(tree, output)
                return value, torch.zeros([], dtype=torch.int, device=output.device), metrics

            return out, loss

        result: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(trees) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(trees),
            seq_length=max(len(t.token_ids) for t in trees),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return result

    def _counts_here(self) -> bool:
        """True on one rank of each data-parallel replica: the last stage's first tensor- and context-parallel rank."""
        first = groups.get_tensor_model_parallel_rank() == groups.get_context_parallel_rank() == 0
        return groups.is_pipeline_last_stage() and first

    def _sum_metrics(self, metrics: list[dict[str, Tensor]], trees: list[PrefixTree]) -> dict[str, float]:
        """Sum (of names that end in "_max": maximum) over micro-batches and data-parallel ranks, on every rank."""
        own: dict[str, float] = {
            "tokens_total": float(sum(t.tokens_total for t in trees)),
            "tokens_unique": float(sum(t.tokens_unique for t in trees)),
        }
        for m in metrics:
            for key, value in m.items():
                own[key] = _combine(key, own.get(key), float(value))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own if self._counts_here() else {})
        total: dict[str, float] = {}
        for part in everyone:
            for key, value in part.items():
                total[key] = _combine(key, total.get(key), value)
        return total

    def _on_every_rank(self, flat: Tensor) -> Tensor:
        """Sum of disjoint parts over data-parallel replicas."""
        if dist.get_world_size() > 1:
            flat = flat if self._counts_here() else torch.zeros_like(flat)
            dist.all_reduce(flat)  # on CPU: gloo
        return flat
