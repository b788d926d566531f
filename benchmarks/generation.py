"""Generation in PivotRL's shape (few long prompts, many short samples): our engine against vLLM as it comes.

Both sides sample the same number of tokens for the same prompts with the same dtype, batch limit and log-probs. Ours
also seeds every sample, so that it can be repeated; plain vLLM does not (its CPU build cannot by default).
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Comparison, interleave, median, parser, show

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
    arguments.add_argument("--hugging-face", action="store_true", help="also time transformers' generate, on 2 prompts")
    options = arguments.parse_args()

    from pivotrl.config import Generation
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine
    from pivotrl.models.builtin import resolve_model

    folder = resolve_model(options.model)
    start = time.perf_counter()
    engine = VllmEngine(folder, Generation(max_sequences=options.max_sequences), options.dtype, 1024, 0, [])
    up = time.perf_counter() - start
    plain = _PlainVllm(folder, options)
    draw = random.Random(0)

    def prompts() -> list[list[int]]:
        """A new shared history each time: both sides start with nothing of it cached."""
        history = [draw.randrange(100, 40000) for _ in range(PREFIX)]
        return [history + [draw.randrange(100, 40000) for _ in range(OWN)] for _ in range(options.prompts)]

    sampling = Sampling(max_new_tokens=options.tokens)
    seeds = list(range(options.prompts))
    seconds = interleave(
        {
            "ours": lambda: engine.generate(prompts(), sampling, options.samples, seeds),
            "theirs": lambda: plain.generate(prompts()),
        },
        options.repeats,
    )
    tokens = options.prompts * options.samples * options.tokens
    details: dict[str, Any] = {"engine_start_seconds": round(up, 1), "repeats": options.repeats}
    if options.hugging_face:
        details["hugging_face_tokens_per_second"] = round(_hugging_face(folder, options, prompts()[:2]), 1)
    result = Comparison(
        benchmark="generation",
        measured=f"{options.model}, {options.dtype}, {options.prompts} prompts of {PREFIX} shared + {OWN} tokens, "
        f"{options.samples} samples of {options.tokens} tokens each, {options.max_sequences} in flight",
        unit="sampled tokens per second, prefill included",
        ours=tokens / median(seconds["ours"]),
        theirs=tokens / median(seconds["theirs"]),
        theirs_is="vLLM, default settings",
        better="higher",
        details=details,
    )
    show(result, as_json=options.json)


def _hugging_face(folder: Path, options: Any, prompts: list[list[int]]) -> float:
    """Tokens per second of transformers' generate, with its own cache and one prefill a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    start = time.perf_counter()
    model.generate(
        torch.tensor(prompts, device=device),
        do_sample=True,
        num_return_sequences=options.samples,
        max_new_tokens=options.tokens,
        min_new_tokens=options.tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return len(prompts) * options.samples * options.tokens / (time.perf_counter() - start)


class _PlainVllm:
    """vLLM as its documentation shows it, in this process."""

    def __init__(self, folder: Path, options: Any) -> None:
        from vllm import LLM, SamplingParams

        self._llm: Any = LLM(
            model=str(folder),
            dtype="bfloat16" if options.dtype == "bf16" else "float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=options.max_sequences,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            use_tqdm_on_load=False,
        )
        self._params = SamplingParams(
            n=options.samples, temperature=1.0, max_tokens=options.tokens, logprobs=0, ignore_eos=True, detokenize=False
        )

    def generate(self, prompts: list[list[int]]) -> None:
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self._params, use_tqdm=False)


if __name__ == "__main__":
    main()
