"""An engine that serves FP8 in blocks, refitted: bit-equal to a fresh engine of the quantised export."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("vllm")

from pivotrl.config import Generation
from pivotrl.errors import UserError
from pivotrl.generation.engine import RefitError, Sampling
from pivotrl.generation.vllm_engine import VllmEngine
from pivotrl.models import block_fp8
from pivotrl.models.fp8_folder import fp8_copy
from tests.tiny_models import SERVED_VOCABULARY, tiny_model

PROMPTS = [[(7 * i + 3 * j) % 320 for j in range(20 + i)] for i in range(3)]


def save(folder: Path, seed: int) -> Path:
    """Sizes that are whole blocks of 128, in the dtype that a checkpoint has."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    tiny_model("llama", seed, vocab_size=SERVED_VOCABULARY, **sizes).to(torch.bfloat16).save_pretrained(folder)
    return folder


def build(folder: Path) -> VllmEngine:
    return VllmEngine(folder, Generation(max_sequences=8, kv_cache_gib=0.25), "fp8", 64, 0, [])


def answers(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    groups = engine.generate(PROMPTS, Sampling(temperature=0.7, max_new_tokens=6), 2, [1, 2, 3])
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


@pytest.mark.engine
def test_refits_quantise_as_the_export_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported():
        pytest.skip("FP8 needs a GPU or a CPU with AMX")
    from safetensors.torch import load_file

    folders = [save(tmp_path / str(seed), seed) for seed in (0, 1)]
    with pytest.raises(UserError, match=r"precision\.engine='fp8': .* holds no FP8 weights"):
        build(folders[0])
    quantised = [fp8_copy(folder, folder.with_name(folder.name + "fp8")) for folder in folders]
    fresh = []
    for which in (0, 1):
        engine = build(quantised[which])
        fresh.append(answers(engine))
        if which == 0:
            engine.close()
    try:
        assert fresh[0] != fresh[1]
        plain = [load_file(folder / "model.safetensors") for folder in folders]
        ready = [load_file(folder / "model.safetensors") for folder in quantised]
        for version, sent in enumerate((plain[0], plain[1], ready[0], plain[1], plain[0])):
            which = version % 2
            engine.refit(list(sent.items()) if version % 2 else iter(sent.items()), version)
            report = engine.last_refit
            assert report is not None and not report.different and not report.unverified
            assert any(name.endswith("weight_scale_inv") for name in report.complete)
            assert answers(engine) == fresh[which]
        scale = next(n for n in ready[0] if n.endswith(block_fp8.SCALE))
        with pytest.raises(RefitError, match="is not positive"):
            engine.refit(iter({**ready[0], scale: torch.zeros_like(ready[0][scale])}.items()), 9)
    finally:
        engine.close()
