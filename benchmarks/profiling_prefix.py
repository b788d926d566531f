"""Prompts of real trajectories in the order of the prompt trie, with the engine's prefix cache: what is prefilled.

    python -m benchmarks.profiling_prefix [--data FILE] [--trajectories 24] [--engine 24 [--turns-each 3]] [--json]

Every assistant turn of trajectories of 2k to 8k tokens, rendered for SmolLM2. Counted: tokens that an engine computes
once for each turn's prompt (the K samples of a turn share it), with a block cache of least recent use, of the size that
the demo has. With --engine N the first N trajectories are really run, --samples of each turn: our profiler with vLLM's
prefix cache in the order of the trie, against plain vLLM without it in a random order; and what of the profiler's time
(rendering, parsing, verifying, storing, statistics) is not the engine's.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Comparison, parser, show

BLOCK = 16  # tokens of a block of vLLM's cache
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # of SmolLM2-135M: keys and values, layers, KV heads, their size, bfloat16
NEW = 16  # tokens of a sample of the real run


def computed(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Tokens that are not found in a prefix cache of `capacity` tokens, least recently used blocks leaving first.

    As in vLLM, whole blocks are cached, and the last token of a prompt is always computed.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0
    for ids in prompts:
        key, keys = 0, []
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(ids[start : start + BLOCK])))
            keys.append(key)
        usable = keys[: (len(ids) - 1) // BLOCK]
        hits = next((i for i, k in enumerate(usable) if k not in cache), len(usable))
        total += len(ids) - hits * BLOCK
        for k in reversed(keys):  # the ends of prompts leave before the beginnings, which more prompts share
            cache[k] = None
            cache.move_to_end(k)
        while len(cache) * BLOCK > capacity:
            cache.popitem(last=False)
    return total


def new_renderer() -> Any:
    from pivotrl.configuration import load_config
    from pivotrl.models.builtin import resolve_model
    from pivotrl.rendering.chat import Renderer

    cfg = load_config(["model=smollm2_135m"])
    return Renderer(resolve_model(cfg.model.path), cfg.model.chat_template, cfg.domain.action_format)


def read_states(path: str, count: int) -> tuple[Any, list[list[Any]]]:
    """(renderer, states of each trajectory in the order of depth): the first `count` of 2k to 8k tokens."""
    from pivotrl.local_rollouts import State
    from pivotrl.trajectories.reader import read_trajectories
    from pivotrl.trajectories.schema import Trajectory, Turn
    from pivotrl.trajectories.turns import split_turns

    renderer = new_renderer()
    found: list[list[Any]] = []
    for item in read_trajectories(path):
        if not isinstance(item, Trajectory):
            continue
        turns = [t for t in split_turns(item, "train") if isinstance(t, Turn)]
        states = [State(t, tuple(renderer.prompt_ids(t.messages, t.tools))) for t in turns]
        if states and 2000 <= len(states[-1].prompt_ids) <= 8000:
            found.append(states)
        if len(found) == count:
            break
    return renderer, found


def spread(states: list[Any], count: int | None) -> list[Any]:
    """At most `count` of a trajectory's states, evenly over its depth, the last one among them."""
    if count is None or count >= len(states):
        return states
    return [states[(i + 1) * len(states) // count - 1] for i in range(count)]


def run_engines(renderer: Any, states: list[Any], samples: int) -> dict[str, float]:
    """A real run of both sides. Seconds are of this machine now; tokens are exact."""
    from vllm import LLM, SamplingParams

    from pivotrl.config import Generation, VerifierConfig
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine
    from pivotrl.local_rollouts import LocalRoller
    from pivotrl.profiling.ledger import Cost
    from pivotrl.profiling.profiler import profile_states
    from pivotrl.profiling.statistics import turn_row
    from pivotrl.profiling.store import RolloutStore
    from pivotrl.verifiers.registry import get_verifier

    folder, settings = renderer.model_dir, Generation(max_sequences=16)
    engine = VllmEngine(folder, settings, "bf16", 8192, 0, [])
    verifier = get_verifier(VerifierConfig("tool_calls"))
    roller = LocalRoller(engine, renderer, verifier, Sampling(max_new_tokens=NEW))
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as place:
        clock = time.perf_counter()
        fresh = new_renderer()  # the other one has seen the prompts, and remembers
        for state in states:
            assert tuple(fresh.prompt_ids(state.turn.messages, state.turn.tools)) == state.prompt_ids
        rendering = time.perf_counter() - clock
        store = RolloutStore(Path(place) / "rollouts.jsonl", samples)
        chunk = max(1, 4 * settings.max_sequences // samples)  # as `pivotrl profile` submits them
        profile_states(states, lambda: roller, store, samples, chunk, 0, lambda chunk, cost: costs.append(cost))
        for state in states:
            turn_row(state.turn, store.rows(state.turn.id))
        ours = time.perf_counter() - clock
        store.close()
    engine.close()
    total = sum(costs, Cost())
    plain: Any = LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=16,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**30,
        use_tqdm_on_load=False,
    )
    shuffled = random.Random(0).sample(states, len(states))
    params = SamplingParams(n=samples, temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    clock = time.perf_counter()
    plain.generate([{"prompt_token_ids": list(s.prompt_ids)} for s in shuffled], params, use_tqdm=False)
    theirs = time.perf_counter() - clock
    return {
        "real_turns": len(states),
        "real_prefill_without": total.prompt,  # without a cache every sample of a turn computes its prompt
        "real_prefill_with": total.prompt - total.cached,
        "real_prefill_ratio": total.prompt / (total.prompt - total.cached),
        "real_seconds": ours,
        "real_seconds_without": theirs,
        "real_wall_ratio": theirs / ours,
        "rendering_seconds": rendering,
        "not_engine_share": (ours - total.seconds) / total.seconds,
    }


def main() -> None:
    arguments = parser(__doc__)
    shared = os.environ.get("PIVOTRL_SHARED", "../shared")
    arguments.add_argument("--data", default=f"{shared}/data/tau_bench/airline_sft.jsonl", help="trajectories")
    arguments.add_argument("--trajectories", type=int, default=24)
    arguments.add_argument("--kv-cache-gib", type=float, default=1.0)
    arguments.add_argument("--engine", type=int, default=0, metavar="N", help="really run the first N trajectories")
    arguments.add_argument("--turns-each", type=int, help="turns of each that are really run, over its depth; all")
    arguments.add_argument("--samples", type=int, default=2, help="of each turn that is really run")
    options = arguments.parse_args()
    renderer, groups = read_states(options.data, options.trajectories)
    states = [s for group in groups for s in group]
    capacity = int(options.kv_cache_gib * 2**30 / BYTES_PER_TOKEN)
    trie = [s.prompt_ids for s in states]
    shuffled = random.Random(0).sample(trie, len(trie))
    asked = sum(map(len, trie))
    details: dict[str, Any] = {
        "turns": len(states),
        "longest_prompts": [min(len(g[-1].prompt_ids) for g in groups), max(len(g[-1].prompt_ids) for g in groups)],
        "random_order_with_cache": computed(shuffled, capacity),
        "trie_order_small_cache": computed(trie, 8192),
        "random_order_small_cache": computed(shuffled, 8192),
        "cache_tokens": capacity,
    }
    if options.engine:
        chosen = [s for group in groups[: options.engine] for s in spread(group, options.turns_each)]
        details |= run_engines(renderer, chosen, options.samples)
    result = Comparison(
        benchmark="profiling_prefix",
        measured=f"{len(groups)} trajectories of {Path(options.data).name}, SmolLM2, one prompt a turn",
        unit="prompt tokens computed",
        ours=computed(trie, capacity),
        theirs=asked,
        theirs_is="random order, no prefix cache",
        better="lower",
        details=details,
    )
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
