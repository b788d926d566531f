"""The real engine on tiny random models, float32: numbers against Hugging Face, refits against fresh engines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pivotrl.config import Generation
from pivotrl.errors import UserError
from pivotrl.generation.engine import Completion, EngineStateError, NonFiniteLogprobs, RefitError, Sampling

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))

from pivotrl.generation.vllm_engine import VllmEngine
from tests.tiny_models import SERVED_VOCABULARY, save_served

Weights = dict[str, torch.Tensor]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
SAMPLED = Sampling(temperature=0.7, max_new_tokens=8)
PROMPTS = [[(7 * i + 3 * j) % SERVED_VOCABULARY for j in range(length)] for i, length in enumerate((70, 33, 5, 97))]
SEEDS = [11, 12, 13, 14]
MODELS = {"llama": "llama", "moe": "qwen3_moe", "hybrid": "nemotron_h"}


def build(folder: Path, **options: object) -> VllmEngine:
    return VllmEngine(folder, Generation(max_sequences=16, **options), "fp32", 128, 0, [])  # type: ignore[arg-type]


def weights_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


class Served:
    """One family: two model folders, a long-lived engine of the first, and fresh answers of both."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.folders = [save_served(MODELS[family], root / f"{family}{seed}", seed) for seed in (0, 1)]
        self.weights = [weights_of(folder) for folder in self.folders]
        self.fresh = []
        for folder in self.folders:
            engine = build(folder)
            self.fresh.append(answers(engine))
            engine.close()
        self.engine = build(self.folders[0])
        self.version = 0

    def refit(self, which: int) -> None:
        self.version += 1
        self.engine.refit(iter(self.weights[which].items()), self.version)


def answers(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Greedy and sampled ids and log-probs, to be compared bit for bit."""
    greedy = engine.generate(PROMPTS, GREEDY, 1, SEEDS)
    sampled = engine.generate(PROMPTS, SAMPLED, 2, SEEDS)
    return [(c.token_ids, c.logprobs) for group in greedy + sampled for c in group]


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(request.param, tmp_path_factory.mktemp("models"))
    yield made
    made.engine.close()


@pytest.fixture
def original(served: Served) -> Served:
    """The engine with its first weights, whatever an earlier test did to it."""
    served.refit(0)
    return served


def reference_logprobs(folder: Path, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + list(completion.token_ids)])  # [1, tokens]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature  # [new, vocabulary]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(original: Served, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=8)
    for prompt, group in zip(PROMPTS, original.engine.generate(PROMPTS, sampling, 2, SEEDS), strict=True):
        for completion in group:
            want = reference_logprobs(original.folders[0], prompt, completion, temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=1e-4, rtol=0)


def test_refit_serves_exactly_the_new_weights_time_after_time(original: Served) -> None:
    assert original.fresh[0] != original.fresh[1]
    for which in (1, 0) * 5:
        original.refit(which)
        assert answers(original.engine) == original.fresh[which]
        report = original.engine.last_refit
        assert report is not None and not report.different and not report.unverified


def test_refit_resets_the_prefix_cache_once(original: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, resets = original.engine, []
    engine.generate([PROMPTS[0]], GREEDY, 1, [0])
    warm = engine.generate([PROMPTS[0]], GREEDY, 1, [0])[0][0]
    # without chunked prefill, which CPU builds cannot have here, states of Mamba layers are not kept
    assert warm.cached_prompt_tokens == (0 if original.family == "hybrid" else 64)
    reset = engine._llm.reset_prefix_cache
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: resets.append(1) or reset())
    original.refit(0)
    cold = engine.generate([PROMPTS[0]], GREEDY, 1, [0])[0][0]
    assert resets == [1] and cold.cached_prompt_tokens == 0
    assert (cold.token_ids, cold.logprobs) == (warm.token_ids, warm.logprobs)
    assert cold.weight_version == original.version == warm.weight_version + 1


def test_seeds(original: Served) -> None:
    def draw(prompts: list[list[int]], seeds: list[int], n: int = 3) -> list[list[tuple[int, ...]]]:
        return [[c.token_ids for c in group] for group in original.engine.generate(prompts, SAMPLED, n, seeds)]

    first = draw(PROMPTS, SEEDS)
    assert draw(PROMPTS, SEEDS) == first
    assert draw(PROMPTS[::-1], SEEDS[::-1]) == first[::-1]  # a sample does not depend on its place in the batch
    assert all(len(set(group)) == 3 for group in first)
    same_prompt = draw([PROMPTS[0]] * 2, [5, 6])
    assert not set(same_prompt[0]) & set(same_prompt[1])  # neighbouring seeds share no sample


def test_samples_are_those_of_one_request_for_them_all(original: Served) -> None:
    """vLLM's own `n`: a prompt is one request and one seed. The server engine asks so."""
    from vllm import SamplingParams

    from pivotrl.generation.requests import first_seed

    ours = original.engine.generate(PROMPTS, SAMPLED, 3, SEEDS)
    common = {"n": 3, "temperature": 0.7, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**common, seed=first_seed(seed)) for seed in SEEDS]
    outputs = original.engine._llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    assert [[c.token_ids for c in g] for g in ours] == [[tuple(s.token_ids) for s in o.outputs] for o in outputs]


def test_completions_are_told_as_they_finish(original: Served) -> None:
    engine, told = original.engine, {}
    groups = engine.generate(PROMPTS, SAMPLED, 2, SEEDS, lambda i, k, c: told.setdefault((i, k), c))
    assert told == {(i, k): c for i, group in enumerate(groups) for k, c in enumerate(group)}

    def stop(i: int, k: int, completion: Completion) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(PROMPTS * 8, SAMPLED, 2, SEEDS * 8, stop)
    assert not engine._llm.llm_engine.has_unfinished_requests()  # nothing of it is left
    again = engine.generate(PROMPTS, SAMPLED, 2, SEEDS)
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen", "nan", "twice"])
def test_bad_refit_names_the_weight_and_stops_generation(original: Served, fault: str, as_list: bool) -> None:
    sent = list(original.weights[1].items())
    name, tensor = sent[len(sent) // 2]
    if fault == "missing":
        sent.remove(sent[len(sent) // 2])
    elif fault == "unknown":
        sent[len(sent) // 2] = (name := name + "x", tensor)
    elif fault == "misshapen":
        sent[len(sent) // 2] = (name, torch.zeros(3, 3))
    elif fault == "nan":
        sent[len(sent) // 2] = (name, torch.full_like(tensor, math.nan))
    else:
        sent.append((name, tensor))
    with pytest.raises(RefitError, match=name.replace(".", r"\.")):
        original.engine.refit(sent if as_list else iter(sent), 99)
    with pytest.raises(EngineStateError, match="refit"):
        original.engine.generate([PROMPTS[0]], GREEDY, 1, [0])
    original.refit(1)
    assert answers(original.engine) == original.fresh[1]


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_value_anywhere_is_seen_and_named(
    original: Served, monkeypatch: pytest.MonkeyPatch, value: float, verify: str
) -> None:
    monkeypatch.setattr(original.engine._generation, "verify_refit", verify)
    generator = torch.Generator().manual_seed(int(verify == "off"))
    mamba = ("in_proj", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "mixer.norm", "out_proj")
    kinds = ("embed", "v_proj", "o_proj", "down_proj", "norm", *(mamba if original.family == "hybrid" else ()))
    for kind in kinds:
        name = next(n for n in original.weights[1] if kind in n)
        bad = original.weights[1][name].clone()
        bad.view(-1)[torch.randint(0, bad.numel(), (1,), generator=generator)] = value
        with pytest.raises(RefitError, match=rf"'{name}' holds NaN or infinite"):
            original.engine.refit(iter({**original.weights[1], name: bad}.items()), 99)


def test_sleep_refit_wake_serves_the_refitted_weights(original: Served) -> None:
    engine = original.engine
    engine.sleep()
    with pytest.raises(EngineStateError, match="wake"):
        engine.generate([PROMPTS[0]], GREEDY, 1, [0])
    with pytest.raises(EngineStateError, match="refit it first"):
        engine.wake()
    original.refit(1)
    with pytest.raises(EngineStateError, match="wake"):
        engine.generate([PROMPTS[0]], GREEDY, 1, [0])
    engine.wake()
    assert answers(engine) == original.fresh[1]


def test_too_long_prompt_and_foreign_ids_are_refused(original: Served) -> None:
    with pytest.raises(UserError, match=r"prompt 1 has 121 tokens.*max_new_tokens=8.*context_length=128"):
        original.engine.generate([[1], [1] * 121], GREEDY, 1, [0, 0])
    with pytest.raises(UserError, match=f"prompt 0 holds token id {SERVED_VOCABULARY}"):
        original.engine.generate([[1, SERVED_VOCABULARY]], GREEDY, 1, [0])
    assert len(original.engine.generate([[1] * 120], GREEDY, 1, [0])[0][0].token_ids) == 8


def test_stop_ids_end_a_completion_and_are_kept(original: Served) -> None:
    plain = original.engine.generate([PROMPTS[0]], GREEDY, 1, [0])[0][0]
    assert plain.finish_reason == "length" and len(plain.token_ids) == 8
    original.engine._stop_token_ids = [plain.token_ids[3]]
    try:
        stopped = original.engine.generate([PROMPTS[0]], GREEDY, 1, [0])[0][0]
    finally:
        original.engine._stop_token_ids = []
    cut = plain.token_ids.index(plain.token_ids[3]) + 1
    assert stopped.finish_reason == "stop"
    assert (stopped.token_ids, stopped.logprobs) == (plain.token_ids[:cut], plain.logprobs[:cut])


def test_nan_logprobs_are_an_error_naming_the_sample(original: Served) -> None:
    def damage(model: torch.nn.Module) -> None:
        norm = model.model.norm_f if original.family == "hybrid" else model.model.norm  # type: ignore[union-attr]
        norm.weight.data.fill_(math.nan)

    original.engine._llm.apply_model(damage)
    original.engine._llm.reset_prefix_cache()
    with pytest.raises(NonFiniteLogprobs, match="prompt 0, sample 0, token 0"):
        original.engine.generate([PROMPTS[0]], SAMPLED, 2, [0])


def test_verification_sees_stale_copies(original: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our repacking the engine would serve old or garbled weights in silence; the check must see it."""
    if original.family == "hybrid":  # vLLM reloads all of it; the decay is served as what A_log stands for
        monkeypatch.setattr(
            original.engine._setup, "repack_heads", lambda model: model.model.layers[0].mixer.A.data.mul_(2)
        )
        stale = r"layers\.0\.mixer\.A"
    elif original.family == "llama":
        monkeypatch.setattr(original.engine._setup, "repack_heads", lambda model: None)
        stale = "lm_head.weight"
    else:
        from pivotrl.generation import direct_load

        monkeypatch.setattr(direct_load, "packed_expert", lambda module, weight: weight)
        stale = "w13_weight"
    with pytest.raises(RefitError, match=stale):
        original.refit(1)
    with pytest.raises(EngineStateError, match="refit"):
        original.engine.generate([PROMPTS[0]], GREEDY, 1, [0])


def test_weights_for_a_server_stream_through_vllm_s_own_sender() -> None:
    """The source must keep the contract of the installed version (0.32 and 0.33 differ)."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine as Sender

    from pivotrl.generation.vllm_setup import weight_source

    sent = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    source = weight_source([(n, t.dtype, tuple(t.shape)) for n, t in sent.items()])
    metadata = source.metadata if isinstance(source.metadata, list) else source.metadata()
    assert [(m.name, m.dtype, m.shape) for m in metadata] == [(n, t.dtype, tuple(t.shape)) for n, t in sent.items()]
    passed: list[str] = []
    for _ in range(2):  # each refit sets a new stream
        passed.clear()
        source.pairs = lambda: ((n, t) for n, t in sent.items() if passed.append(n) is None)
        Sender(client=None, source=source, is_sender=False).send_weights()  # type: ignore[arg-type]
        assert passed == ["a", "b"]
        assert [name for name, _ in Sender._checked_iter(source, metadata)] == ["a", "b"]
    source.pairs = lambda: iter([("a", sent["a"])])
    with pytest.raises(ValueError, match="1 parameters but metadata"):
        list(Sender._checked_iter(source, metadata))


def test_routed_experts_are_refused_where_vllm_cannot_give_them(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("GPU builds give them back")
    with pytest.raises(UserError, match=r"generation\.routed_experts"):
        build(save_served("qwen3_moe", tmp_path / "moe", 0), routed_experts=True)


def test_exported_folder_is_served_alike(served: Served, tmp_path: Path) -> None:
    """Converted to Megatron and back: the engine's tokens and log-probs are bit-equal.

    The last test of the module: to close an engine takes vLLM's groups from the other one in this process.
    """
    from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf

    hf_to_megatron(served.folders[1], tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    engine = build(tmp_path / "back")
    try:
        assert answers(engine) == served.fresh[1]
    finally:
        engine.close()
