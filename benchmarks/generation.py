"""Generation in PivotRL's shape (few long prompts, many short samples): our engine against vLLM and Hugging Face.

    python -m benchmarks.generation --json

Four sides in one process, their runs interleaved, on the same new prompts in every round: the engine of
`pivotrl profile` and `train`; `vllm.LLM.generate` on the same vLLM engine with the same seeds, the samples of a prompt
as one request, which must sample the same tokens; the same on an engine with vLLM's default settings; and
`transformers` generate on the first of the prompts. Tokens per second are of sampled tokens, prefill included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Comparison, interleave, median, parser, show

Rows = list[list[tuple[int, ...]]]

PREFIX, OWN = 500, 12  # tokens of the shared history, and of each prompt beyond it


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(repeats=3)
    arguments.add_argument("--model", default="builtin:smollm2-135m")
    arguments.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    arguments.add_argument("--prompts", type=int, default=16)
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=40)
    arguments.add_argument("--max-sequences", type=int, default=128)
    arguments.add_argument(
        "--defaults", action=argparse.BooleanOptionalAction, default=True, help="vLLM's settings too"
    )
    arguments.add_argument("--hugging-face-prompts", type=int, default=2, help="0: leave transformers out")
    options = arguments.parse_args()

    from pivotrl.config import Generation
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine
    from pivotrl.models.builtin import resolve_model

    folder = resolve_model(options.model)
    start = time.perf_counter()
    engine = VllmEngine(folder, Generation(max_sequences=options.max_sequences), options.dtype, 1024, 0, [])
    up = time.perf_counter() - start
    bare = _BareVllm(engine._llm, options)
    sampling, seeds = Sampling(max_new_tokens=options.tokens), list(range(options.prompts))
    sampled: dict[str, Rows] = {}

    def ours(prompts: list[list[int]]) -> None:
        groups = engine.generate(prompts, sampling, options.samples, seeds)
        sampled["ours"] = [[c.token_ids for c in group] for group in groups]
        engine._reset_prefix_cache()  # the other side has the same engine and prompts
        sampled["cached"] = [[(c.cached_prompt_tokens,) for c in group] for group in groups]

    def theirs(prompts: list[list[int]]) -> None:
        sampled["theirs"] = bare.generate(prompts, seeds)

    sides = {"ours": _Rounds(options.prompts, ours), "theirs": _Rounds(options.prompts, theirs)}
    if options.defaults:
        plain = _BareVllm(_default_engine(folder, options), options)
        sides["vllm_defaults"] = _Rounds(options.prompts, lambda p: plain.generate(p, seeds))
    if options.hugging_face_prompts:
        model = _HuggingFace(folder, options)
        sides["hugging_face"] = _Rounds(options.prompts, lambda p: model.generate(p[: options.hugging_face_prompts]))
    seconds = interleave(sides, options.repeats)
    show(_comparison(options, seconds, sampled, up), as_json=options.json)


def _comparison(options: Any, seconds: dict[str, list[float]], sampled: dict[str, Rows], up: float) -> Comparison:
    row = options.samples * options.tokens
    tokens = options.prompts * row
    lengths = {len(ids) for side in ("ours", "theirs") for group in sampled[side] for ids in group}
    assert lengths == {options.tokens}, f"completions of {lengths} tokens are no equal work"
    details: dict[str, Any] = {
        "seconds": {side: [round(x, 3) for x in values] for side, values in seconds.items()},
        "same_tokens": sampled["ours"] == sampled["theirs"],
        "prompt_tokens_computed_a_sample": PREFIX + OWN - statistics.fmean(x for g in sampled["cached"] for (x,) in g),
        "engine_start_seconds": round(up, 1),
        "repeats": options.repeats,
    }
    if "vllm_defaults" in seconds:
        details["vllm_defaults_tokens_per_second"] = round(tokens / median(seconds["vllm_defaults"]), 1)
    if "hugging_face" in seconds:
        speed = options.hugging_face_prompts * row / median(seconds["hugging_face"])
        details["hugging_face_tokens_per_second"] = round(speed, 1)
        details["ratio_to_hugging_face"] = round(tokens / median(seconds["ours"]) / speed, 2)
    return Comparison(
        benchmark="generation",
        measured=f"{options.model}, {options.dtype}, {options.prompts} prompts of {PREFIX} shared + {OWN} tokens, "
        f"{options.samples} samples of {options.tokens} tokens each, {options.max_sequences} in flight",
        unit="sampled tokens per second, prefill included",
        ours=tokens / median(seconds["ours"]),
        theirs=tokens / median(seconds["theirs"]),
        theirs_is="vllm.LLM.generate, same engine",
        better="higher",
        details=details,
    )


class _Rounds:
    """One side: every call is a round with prompts of its own, the same ones for all sides, nothing of them cached."""

    def __init__(self, count: int, run: Callable[[list[list[int]]], object]) -> None:
        self._draw, self._count, self._run = random.Random(0), count, run

    def __call__(self) -> None:
        history = [self._draw.randrange(100, 40000) for _ in range(PREFIX)]
        self._run([history + [self._draw.randrange(100, 40000) for _ in range(OWN)] for _ in range(self._count)])


class _HuggingFace:
    """transformers' generate, with its own cache and one prefill a sample."""

    def __init__(self, folder: Path, options: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._options = options
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(self._device).eval()

    def generate(self, prompts: list[list[int]]) -> None:
        import torch

        self._model.generate(
            torch.tensor(prompts, device=self._device),
            do_sample=True,
            num_return_sequences=self._options.samples,
            max_new_tokens=self._options.tokens,
            min_new_tokens=self._options.tokens,
            eos_token_id=None,
            pad_token_id=0,
        )


def _default_engine(folder: Path, options: Any) -> Any:
    """vLLM as its documentation shows it, in this process."""
    from vllm import LLM
    from vllm.platforms import current_platform

    return LLM(
        model=str(folder),
        dtype="bfloat16" if options.dtype == "bf16" else "float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=options.max_sequences,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
        # CPU builds cannot seed a prompt that is computed in chunks; the other is their amount of memory
        **({"enable_chunked_prefill": False, "kv_cache_memory_bytes": 2**30} if current_platform.is_cpu() else {}),
    )


class _BareVllm:
    """`LLM.generate` without our layer: one request a prompt."""

    def __init__(self, llm: Any, options: Any) -> None:
        self._llm, self._options = llm, options

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> Rows:
        from vllm import SamplingParams

        from pivotrl.generation.requests import first_seed

        o = self._options
        common = {"n": o.samples, "temperature": 1.0, "max_tokens": o.tokens, "logprobs": 0, "ignore_eos": True}
        params = [SamplingParams(**common, seed=first_seed(seed), detokenize=False) for seed in seeds]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        self._llm.reset_prefix_cache()
        return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


if __name__ == "__main__":
    main()
