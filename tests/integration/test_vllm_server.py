"""The server engine against a real vLLM server on CPU, and against the engine in this process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pivotrl.config import Generation
from pivotrl.generation.engine import RefitError, Sampling
from pivotrl.generation.server_engine import ServerEngine
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.engine]
START_SECONDS = 240
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pivotrl.models.builtin import resolve_model

    path = tmp_path_factory.mktemp("server") / "tiny"
    save_tiny("llama", path, vocab_size=49152, head_dim=32)
    for file in resolve_model("builtin:smollm2-135m").glob("*token*"):  # a server wants one, even for token ids
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    pytest.importorskip("vllm")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8"]
    options += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--port", str(port)]
    options += ["--host", "127.0.0.1", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
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
        server.wait(30)
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
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    for ours, theirs in zip(server.generate(PROMPTS, greedy, 1, [0, 0]), engine.generate(PROMPTS, greedy, 1, [0, 0])):
        assert ours[0].token_ids == theirs[0].token_ids
        assert ours[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-4)
    # the server's log-probs are those of the sampling distribution: at temperature 1 the engine's own scores
    warm = server.generate(PROMPTS, Sampling(temperature=1.0, max_new_tokens=4), 1, [0, 0])
    scores = engine.score(PROMPTS, [group[0].token_ids for group in warm])
    for group, score in zip(warm, scores, strict=True):
        assert group[0].logprobs == pytest.approx(score, abs=1e-4)
    engine.close()
    with pytest.raises(RefitError, match="without a weight sender"):
        server.refit([], 1)
