"""The TRL side of benchmarks.prefix_tree: GRPOTrainer's own step, with the completions given by its `rollout_func`.

Runs in an environment with trl, which need not have this package.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.prefix_tree_work import Setting, Shape, answer, draw, memory_megabytes, micro_batch, requests, reward


class OnRequest(TrainerCallback):
    """Lets the trainer make a step when the parent asks for one, and answers with what it took."""

    def __init__(self) -> None:
        self.requests = requests()
        self.shape = Shape()
        self.start = self.cpu = self.seconds = self.cpu_seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        shape = next(self.requests, None)
        if shape is None:
            sys.exit(0)
        self.shape = shape
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "grad_norm" in logs:
            peak = round(memory_megabytes(), 1)
            answer(seconds=self.seconds, cpu=self.cpu_seconds, peak_mb=peak, grad_norm=float(logs["grad_norm"]))


def main(setting: Setting, shape: Shape) -> None:
    before = memory_megabytes()
    clock = OnRequest()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompt k is the name of pivot k; its completions are taken in turn."""
        trunk, actions = draw(clock.shape, setting.vocabulary)
        depths = clock.shape.depths()
        taken = [0] * len(depths)
        made: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "number": []}
        for pivot in map(int, prompts):
            number = taken[pivot] % clock.shape.group
            taken[pivot] += 1
            made["prompt_ids"].append(trunk[: depths[pivot]])
            made["completion_ids"].append(actions[pivot][number])
            made["logprobs"].append([-10.0] * clock.shape.action)
            made["number"].append(number)
        return made

    def score(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        return [reward(n) for n in number]

    size = micro_batch(setting, shape)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=setting.dtype == "bf16",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=shape.pivots * shape.group // size,
            num_generations=shape.group,
            max_completion_length=shape.action,
            gradient_checkpointing=setting.recompute,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            max_steps=1000,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(setting.model),
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(k) for k in range(shape.pivots)]}),
            rollout_func=rollout,
            callbacks=[clock],
        )
        answer(imports_mb=round(before, 1), micro_batch=size)
        trainer.train()


if __name__ == "__main__":
    main(Setting(**json.loads(sys.argv[2])), Shape(**json.loads(sys.argv[3])))
