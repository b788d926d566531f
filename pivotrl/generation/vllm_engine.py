"""vLLM in this process, sharing the accelerator with the trainer (the colocated engine)."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.config import Generation
from pivotrl.errors import UserError
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.data_parallel import gather_groups, share
from pivotrl.generation.engine import Completion, OnFinished, Sampling, refuse_non_finite
from pivotrl.generation.refit_check import ExpectedWeights
from pivotrl.generation.requests import check_lengths, check_request, check_token_ids, sample_seed
from pivotrl.generation.routed import RoutedLayers
from pivotrl.models.folder import ModelFolder
from pivotrl.refit.layout import EngineLayout

if TYPE_CHECKING:
    from torch import Tensor

    from pivotrl.generation.refit_verify import RefitReport
    from pivotrl.refit.execute import Shard

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
_BLOCK_TOKENS = 32  # KV block: what a prompt shares is reused in whole blocks, and the CPU kernels want multiples of 32
_PREFILL_TOKENS = 4096  # tokens of one forward, at least


class VllmEngine(StatefulEngine):
    """`pivotrl.generation.engine.Engine` on vLLM.

    Args:
        model_dir: Hugging Face folder with safetensors weights; names and shapes of every refit are checked against it.
        dtype: "fp32", "bf16" or "fp8": the folder's linear layers are FP8 in blocks, all else computes in bfloat16.
        max_length: tokens of prompt and completion together.
        seed: of the engine; samples are seeded one by one by `generate`.
        stop_token_ids: ids that end a completion (and are part of it). The model's own end ids are not added.

    Under torchrun it is one part of a tensor-parallel group of `generation.tensor_parallel` processes; the groups
    share the prompts of a call. Every process makes the same calls with the same arguments and gets all completions.
    """

    def __init__(
        self,
        model_dir: Path,
        generation: Generation,
        dtype: str,
        max_length: int,
        seed: int,
        stop_token_ids: list[int],
    ) -> None:
        from pivotrl.generation import vllm_setup
        from pivotrl.generation.quantised import Quantiser

        if dtype not in _DTYPES:
            raise UserError(f"precision.engine={dtype!r}: the engine knows {', '.join(_DTYPES)}")
        super().__init__()
        self.last_refit: RefitReport | None = None
        self._setup = vllm_setup
        self._generation = generation
        self._max_length = max_length
        self._stop_token_ids = list(stop_token_ids)
        expected = ExpectedWeights.from_folder(model_dir)  # refuses a folder without weights before vLLM is started
        if (Quantiser.of(model_dir, expected.shapes) is not None) != (dtype == "fp8"):
            held = "holds no" if dtype == "fp8" else "holds"
            raise UserError(f"precision.engine={dtype!r}: {model_dir} {held} FP8 weights; use another precision.engine")
        vllm_setup.set_environment()
        self._vllm = vllm_setup.import_vllm()
        self._on_cpu = self._vllm.platforms.current_platform.is_cpu()
        self._joined_groups = _has_process_groups()
        distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if generation.tensor_parallel > 1 and not distributed:
            raise UserError(
                f"generation.tensor_parallel={generation.tensor_parallel} needs as many processes; "
                "start with torchrun or srun, or set it to 1"
            )
        if distributed and self._on_cpu:
            vllm_setup.remove_stale_shared_memory()
        self._routed = RoutedLayers.of_folder(model_dir) if generation.routed_experts else None
        with vllm_setup.quiet():
            self._llm = self._vllm.LLM(**self._arguments(model_dir, dtype, seed, distributed))
        self._model_config = self._llm.llm_engine.model_config
        self._vocabulary = self._model_config.get_vocab_size()
        from pivotrl.generation.served import ignored_biases
        from pivotrl.generation.vllm_refit import VllmRefit

        tensor_rank = int(os.environ.get("RANK", "0")) % generation.tensor_parallel
        self._refit = VllmRefit(self._llm, vllm_setup, model_dir, generation, tensor_rank)
        names = list(expected.shapes)
        if ignored := self._llm.apply_model(lambda model: ignored_biases(model, names))[0]:
            self.close()
            raise UserError(
                f"{model_dir}: vLLM's model of this architecture has no {ignored[0]} ({len(ignored)} biases), "
                "so it would serve another model than the one that is trained; use a model without them"
            )

    def _arguments(self, model_dir: Path, dtype: str, seed: int, distributed: bool) -> dict[str, Any]:
        """Of vLLM's LLM. Raises UserError for what a CPU build cannot do."""
        generation = self._generation
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # no sampling defaults or stop ids from the folder
            "dtype": _DTYPES[dtype],
            "max_model_len": self._max_length,
            "max_num_seqs": generation.max_sequences,
            "max_num_batched_tokens": max(self._max_length, _PREFILL_TOKENS),
            "block_size": _BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": generation.enforce_eager,
            "seed": seed,
            "use_tqdm_on_load": False,
        }
        if generation.routed_experts:
            if self._on_cpu:
                raise UserError("generation.routed_experts: CPU builds of vLLM cannot give them back; set it to false")
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that gives them back
            arguments["enable_return_routed_experts"] = True
        if self._on_cpu:
            # a chunk of a seeded prompt rewinds its generator, which CPU generators cannot do (RuntimeError); and
            # without chunks vLLM keeps no states of Mamba layers by prefix
            arguments["enable_chunked_prefill"] = False
            arguments["enable_prefix_caching"] = not _has_mamba(model_dir)
            arguments["kv_cache_memory_bytes"] = int(generation.kv_cache_gib * 2**30)
        else:
            arguments["enable_sleep_mode"] = True
            arguments["gpu_memory_utilization"] = generation.gpu_memory_utilization
        if distributed:
            arguments["distributed_executor_backend"] = "external_launcher"
            arguments["tensor_parallel_size"] = generation.tensor_parallel
        if generation.expert_parallel:
            if self._on_cpu:
                raise UserError("generation.expert_parallel: CPU builds of vLLM cannot spread experts; set it to false")
            arguments["enable_expert_parallel"] = True
        return arguments

    @property
    def layout(self) -> EngineLayout:
        """Which ranks of the world serve which part of the weights."""
        tensor = self._generation.tensor_parallel
        expert = tensor if self._generation.expert_parallel else 1
        return EngineLayout(int(os.environ.get("WORLD_SIZE", "1")) // tensor, tensor, expert)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. Everything is submitted at once; samples of a prompt share its prefix.

        At temperature 0 (greedy) log-probs are those at temperature 1.

        Raises:
            EngineStateError: asleep, weights only, or after a failed refit.
            UserError: a prompt that does not fit the context, or ids outside the vocabulary.
            NonFiniteLogprobs: the model gave NaN for a sampled token.
        """
        self._state.require_generate()
        check_request(prompts, n, seeds)
        check_lengths(prompts, sampling.max_new_tokens, self._max_length)
        check_token_ids(prompts, self._vocabulary)
        if not prompts:
            return []
        # prompts that share a history are neighbours: its blocks are still cached when the next one comes
        order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
        rank, layout = int(os.environ.get("RANK", "0")), self.layout
        tell = on_finished if rank % layout.tensor == 0 else None
        if layout.engines == 1:
            return self._sample(prompts, sampling, n, seeds, order, tell)
        mine = share(order, rank // layout.tensor, layout.engines)
        return gather_groups(len(prompts), mine, lambda: self._sample(prompts, sampling, n, seeds, mine, tell))

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        order: Sequence[int],
        on_finished: OnFinished | None,
    ) -> list[list[Completion]]:
        """Completions of the prompts in `order`, at their places; the others' places stay empty."""
        # One request a sample. vLLM makes as many of one with n > 1, from the same seeds, and computes the prompt once
        # either way; but it would give them back all together, with the cached tokens of one of them.
        places = [(i, k) for i in order for k in range(n)]
        requests = [{"prompt_token_ids": list(prompts[i])} for i, _ in places]
        params = [self._params(sampling, sample_seed(seeds[i], k)) for i, k in places]
        groups: list[list[Completion | None]] = [[] for _ in prompts]
        for i in order:
            groups[i] = [None] * n
        with _global_generator_kept(), closing(self._as_they_finish(requests, params)) as outputs:
            for place, output in outputs:
                i, k = places[place]
                completion = groups[i][k] = self._completion(output)
                if on_finished:
                    on_finished(i, k, completion)
        found = [[c for c in group if c is not None] for group in groups]
        refuse_non_finite(found)
        return found

    def _as_they_finish(self, requests: list[Any], params: list[Any]) -> Generator[tuple[int, Any]]:
        """(number of the request, its output) of each request as it finishes. None is left if the caller stops."""
        if not requests:
            return
        engine = self._llm.llm_engine
        ids = self._llm.enqueue(requests, params, use_tqdm=False)
        numbers = {name.partition("-")[0]: i for i, name in enumerate(ids)}  # vLLM appends a random part to its own
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield numbers.pop(output.request_id), output
        finally:
            if numbers:
                engine.abort_request(ids, internal=True)

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs, at temperature 1, of each continuation's tokens after its prompt. Errors as of `generate`."""
        self._state.require_generate()
        whole = [[*prompt, *continuation] for prompt, continuation in zip(prompts, continuations, strict=True)]
        check_lengths(whole, 1, self._max_length)
        check_token_ids(whole, self._vocabulary)
        # with a seed, although nobody asks for the token: nothing is drawn from a global generator
        params = self._vllm.SamplingParams(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
        with _global_generator_kept():
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
        return [
            [float(output.prompt_logprobs[i][ids[i]].logprob) for i in range(len(prompt), len(ids))]
            for output, ids, prompt in zip(outputs, whole, prompts, strict=True)
        ]

    def _sleep(self, discard_weights: bool) -> None:
        """On CPU builds no memory moves; the same order of calls is demanded."""
        if not self._on_cpu:
            self._llm.sleep(level=2 if discard_weights else 1)
        self._reset_prefix_cache()

    def _forget(self) -> None:
        self._reset_prefix_cache()

    def _wake(self) -> None:
        if not self._on_cpu:
            self._llm.wake_up()  # what is still asleep: the KV cache, and the weights if they were kept

    def _wake_weights(self) -> None:
        if not self._on_cpu:
            self._llm.wake_up(tags=["weights"])

    def _load(self, weights: Iterable[tuple[str, Tensor | Shard]], version: int) -> None:
        """Every tensor is checked before it is loaded; a list or tuple is checked whole before anything is."""
        report = self._refit.run(weights, version)
        self._reset_prefix_cache()
        self.last_refit = report or self.last_refit

    def _close(self) -> None:
        """Free the model and the KV cache. The trainer's process groups stay."""
        if hasattr(self, "_llm"):
            with self._setup.default_group_kept() if self._joined_groups else nullcontext():
                del self._llm, self._refit
                gc.collect()

    def _params(self, sampling: Sampling, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,  # only our stop ids end a completion, as in the server engine
            seed=seed,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any) -> Completion:
        sample = output.outputs[0]
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the engine ended a request with {sample.finish_reason!r}; see its log")
        ids, logprobs = tuple(sample.token_ids), sample.logprobs
        if tuple(logprobs.token_ids) != ids:
            raise RuntimeError("the engine's log-probs are not those of its sampled tokens (unknown vLLM version?)")
        return Completion(
            ids,
            tuple(logprobs.logprobs),
            sample.finish_reason,
            self.weight_version,
            output.num_cached_tokens or 0,
            None if self._routed is None else self._routed.pick(sample.routed_experts),
        )

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache (requests still running?)")


def _has_mamba(model_dir: Path) -> bool:
    """By its settings: an engine may serve families that the policy does not know."""
    return any(key.startswith("mamba_") for key in ModelFolder(model_dir).config)


def _has_process_groups() -> bool:
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


@contextmanager
def _global_generator_kept() -> Iterator[None]:
    """CPU builds draw from torch's global generator in every step, also for requests with seeds: how often an engine
    was asked must not show in the state of a run that continues."""
    import torch

    with torch.random.fork_rng(devices=[]):
        yield
