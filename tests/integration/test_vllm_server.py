"""The server engine against a real vLLM server on CPU: sampling, refits through vLLM's weight transfer, training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pivotrl.config import Generation
from pivotrl.generation.engine import Completion, RefitError, Sampling
from pivotrl.generation.server_engine import ServerEngine
from pivotrl.generation.server_files import FileSender
from pivotrl.io import read_jsonl, write_json, write_jsonl
from pivotrl.ports import free_port
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.engine]
START_SECONDS = 240
LENGTH = 2048
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that is served first, and one of other weights."""
    from pivotrl.models.builtin import resolve_model

    root = tmp_path_factory.mktemp("server")
    for seed in (0, 1):
        path = root / f"tiny{seed}"
        save_tiny("llama", path, seed=seed, vocab_size=49152, head_dim=32, max_position_embeddings=LENGTH)
        for file in resolve_model("builtin:smollm2-135m").glob("*token*"):  # a server wants one, even for token ids
            shutil.copy(file, path)
    return root / "tiny0", root / "tiny1"


@pytest.fixture(scope="module")
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    pytest.importorskip("vllm")
    port = free_port()
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(LENGTH), "--max-num-seqs", "8"]
    options += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--port", str(port)]
    options += ["--host", "127.0.0.1", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    options += ["--worker-extension-cls", "pivotrl.generation.file_transfer.Extension"]
    options += ["--weight-transfer-config", '{"backend": "file"}']
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
    log = folder.with_name("server.log").open("w+")
    server = subprocess.Popen(
        [sys.executable, *module, *options], env=environment, stdout=log, stderr=log, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(address + "/health", timeout=5).close()
                break
            except OSError:
                log.flush()
                said = Path(log.name).read_text()[-3000:]
                assert server.poll() is None and time.monotonic() < deadline, said
                time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, 15)
        server.wait(120)
        log.close()


def test_a_real_server_samples_and_scores_as_the_engine_here(url: str, folder: Path) -> None:
    from pivotrl.generation.vllm_engine import VllmEngine

    sampling = Sampling(temperature=0.7, max_new_tokens=6)
    server = ServerEngine(url, stop_token_ids=[2])
    groups = server.generate(PROMPTS, sampling, 3, [1, 2])
    assert server.generate(PROMPTS, sampling, 3, [1, 2]) == groups  # seeded
    assert all(0 < len(c.token_ids) <= 6 for group in groups for c in group)
    assert len({c.token_ids for c in groups[0]}) == 3
    engine = VllmEngine(folder, Generation(max_sequences=8), "fp32", 128, 0, [2])
    assert_alike(groups, engine.generate(PROMPTS, sampling, 3, [1, 2]))  # the same seeds: the same samples
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    assert_alike(server.generate(PROMPTS, greedy, 1, [0, 0]), engine.generate(PROMPTS, greedy, 1, [0, 0]))
    # the server's log-probs are those of the sampling distribution: at temperature 1 the engine's own scores
    warm = server.generate(PROMPTS, Sampling(temperature=1.0, max_new_tokens=4), 1, [0, 0])
    scores = engine.score(PROMPTS, [group[0].token_ids for group in warm])
    for group, score in zip(warm, scores, strict=True):
        assert group[0].logprobs == pytest.approx(score, abs=1e-4)
    engine.close()
    with pytest.raises(RefitError, match="without a weight sender"):
        server.refit([], 1)


def assert_alike(ours: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    for a, b in zip([c for group in ours for c in group], [c for group in theirs for c in group], strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_refits_through_the_weight_transfer_serve_the_new_weights(
    url: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Time after time, with a head that is tied to the embedding; what is wrong is refused before it is sent."""
    from safetensors.torch import load_file

    engine = ServerEngine(url, stop_token_ids=[2], sender=FileSender(tmp_path, 0), folder=folders[0])
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    first = engine.generate(PROMPTS, greedy, 1, [0, 0])
    found = []
    for version, which in enumerate((1, 0, 1, 0), start=1):
        if version % 2:
            engine.sleep()
        engine.refit(iter(weights[which].items()), version)
        if version % 2:
            engine.wake()
        found.append(engine.generate(PROMPTS, greedy, 1, [0, 0]))
        assert {c.weight_version for group in found[-1] for c in group} == {version}
    assert_alike(found[1], first)
    assert_alike(found[3], first)
    assert_alike(found[2], found[0])
    for group, prompt in zip(found[0], PROMPTS, strict=True):
        want = reference_logprobs(folders[1], prompt, group[0])
        assert group[0].logprobs == pytest.approx(want, abs=1e-4)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RefitError, match="no weight 'nowhere'"):
        engine.refit([("nowhere", weights[0]["model.norm.weight"])], 9)


def reference_logprobs(folder: Path, prompt: list[int], completion: Completion) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(scores, completion.token_ids, strict=True)]


def test_training_one_step_off_on_a_real_server(url: str, folder: Path, tmp_path: Path) -> None:
    """The gate before the first step, and the canary after every refit, compare trainer and server in float32."""
    from pivotrl import cli

    common = [
        *(f"run_dir={tmp_path}", f"model.path={folder}", f"model.context_length={LENGTH}", "domain=outfitters"),
        *("model.chat_template=hermes", "environment.families=[cancel_order]", "trajectories.tasks=6"),
        *("domain.verifier.name=tests.parity_verifier:Parity", "precision=fp32", "tracking=disabled"),
        *("sampling.max_new_tokens=6", "algorithm.steps=3", "algorithm.pivots_per_step=2", "algorithm.group_size=4"),
        *("algorithm.allow_foreign_profile=true", "algorithm.optimizer.learning_rate=1e-3"),
        *(f"generation.server={url}", "generation.weight_transfer=file"),
        *("algorithm.one_step_off=true", "algorithm.importance_correction=truncated"),
    ]
    assert cli.main(["turns", *common]) == 0
    turns = [row for row in read_jsonl(tmp_path / "turns" / "turns.jsonl") if row["split"] == "train"]
    write_jsonl(tmp_path / "select" / "pivots.jsonl", [{"turn_id": row["id"]} for row in turns[:6]])
    write_json(tmp_path / "profile" / "summary.json", {"fingerprint": {}})
    assert cli.main(["train", *common]) == 0
    rows = list(read_jsonl(tmp_path / "train" / "metrics.jsonl"))
    assert [row["staleness"] for row in rows] == [0.0, 1.0, 1.0]
    assert rows[0]["gate_mismatch"] < 1e-4
    assert all(row["canary_mismatch"] < 1e-4 for row in rows)
    assert rows[0]["mismatch_abs"] < 1e-4 < rows[1]["mismatch_abs"]  # what the update moved
    assert rows[1]["importance_max"] != pytest.approx(1.0, abs=1e-4)
