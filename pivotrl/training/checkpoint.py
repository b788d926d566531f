"""The end of a training stage: a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from pivotrl.policy.policy import MegatronPolicy
from pivotrl.setup import Workbench


def export(policy: MegatronPolicy, bench: Workbench, out_dir: Path) -> None:
    """Write the policy beside its tokenizer and the chat template it was trained with."""
    with policy.memory.resident():
        policy.save_hf(out_dir, source_dir=bench.start_policy, chat_template=bench.renderer.template)
