"""`pivotrl preflight`: thirty broken configurations and what it says of each, on the shape of Qwen3-30B-A3B."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from launch import checks, preflight
from launch.jobs import Job, jobs_for
from pivotrl import cli, stage_state
from pivotrl.configuration import load_config

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What docs/cluster.md starts: 64 GPUs of 80 GiB.
SOUND = (
    "experiment=tau2",
    "cluster=h100",
    "cluster.nodes=8",
    "parallel.context=1",
    "algorithm.optimizer.recompute=true",
    "tracking=disabled",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real shape, an empty weight file and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("qwen3")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_30B))
    (folder / "model.safetensors").touch()
    return folder


class Place:
    """A run directory and a model that a row may spoil."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.run = folder / "run"
        self.data = folder / "data.jsonl"
        self.data.write_text("{}\n")
        self.model = folder / "model"
        self.model.mkdir()
        for path in model.iterdir():
            (self.model / path.name).write_bytes(path.read_bytes())

    def config(self, **changes: Any) -> None:
        (self.model / "config.json").write_text(json.dumps({**QWEN3_30B, **changes}))

    def turns(self, characters: int) -> None:
        row = {
            "id": "t0#0",
            "trajectory_id": "t0",
            "task_id": "t0",
            "depth": 0,
            "domain": "tau2",
            "split": "train",
            "messages": [{"role": "user", "content": "x" * characters}],
            "tools": [],
            "demonstration": {"text": "yes"},
        }
        (self.run / "turns").mkdir(parents=True)
        (self.run / "turns" / "turns.jsonl").write_text(json.dumps(row) + "\n")
        (self.run / "turns" / "summary.json").write_text("{}")

    def profile(self, **sampling: Any) -> None:
        now = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4096, **sampling}
        record = {"sampling": now, "verifier": {"name": "tool_calls", "config": {}}}
        for stage in ("profile", "select"):
            (self.run / stage).mkdir(parents=True)
        (self.run / "profile" / "summary.json").write_text(json.dumps({"fingerprint": record}))
        (self.run / "select" / "pivots.jsonl").write_text("{}\n")

    def overrides(self) -> list[str]:
        return [*SOUND, f"model.path={self.model}", f"trajectories.path={self.data}", f"run_dir={self.run}"]


def told(place: Place, job: str, *changes: str) -> list[str]:
    overrides = [*place.overrides(), *changes]
    return preflight.problems(load_config(overrides), jobs_for(job), overrides)


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None if name == "sbatch" else f"/usr/bin/{name}")
    free = checks.shutil.disk_usage(tmp_path)._replace(free=2**42)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: free)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Place(tmp_path, model)


def test_a_sound_one_passes_in_seconds(place: Place) -> None:
    started = time.process_time()  # of this process: the machine may be busy
    assert told(place, "pipeline") == []
    assert time.process_time() - started < 10


@pytest.mark.parametrize("experiment", ["tau2", "swe", "terminal", "search"])
def test_experiments_pass_with_their_own_layouts(place: Place, experiment: str) -> None:
    """Context parallelism and all; on 64 GPUs of 80 GiB."""
    own = [x for x in place.overrides() if not x.startswith(("experiment=", "parallel."))]
    assert load_config([f"experiment={experiment}", *own]).parallel.context > 1
    overrides = [f"experiment={experiment}", *own]
    assert preflight.problems(load_config(overrides), jobs_for("train"), overrides) == []


BY_OVERRIDE = [
    # what is changed, job, what the message says
    ("parallel.pipeline=5", "train", "pipeline 5 x context 1 = 5 does not divide the world size 64"),
    ("parallel.expert=24", "train", "expert 24 x pipeline 4 = 96 does not divide the world size 64"),
    ("parallel.tensor=2", "train", "parallel.tensor=2 with a mixture of experts needs parallel.sequence=true"),
    ("parallel.tensor=16", "train", "needs parallel.sequence=true"),
    ("parallel.context=5", "train", "pipeline 4 x context 5 = 20 does not divide the world size 64"),
    ("cluster.nodes=3", "train", "does not divide the world size 24"),
    ("algorithm.pivots_per_step=60", "train", "is not a multiple of the data-parallel size 16"),
    ("algorithm.group_size=1", "train", "a group advantage needs at least 2 actions"),
    ("sampling.temperature=0", "profile", "every variance and every advantage would be 0"),
    ("sampling.max_new_tokens=40000", "profile", "leaves no room for a state"),
    ("model.context_length=300000", "profile", "exceeds the model's 262144 positions"),
    ("precision.fp8=mxfp8", "train", "needs a GPU of compute capability 10.0"),
    ("precision.fp8_first_layers_bf16=1", "train", "do nothing with precision.fp8=null"),
    ("generation.tensor_parallel=6", "profile", "generation.tensor_parallel=6 does not divide"),
    ("generation.gpu_memory_utilization=0.05", "profile", "the engine needs"),
    ("generation.gpu_memory_utilization=0.9", "train", "memory: training needs"),
    ("algorithm.optimizer.recompute=false", "train", "set algorithm.optimizer.recompute=true"),
    ("cluster.gpu_memory_gib=24", "train", "cluster.gpu_memory_gib is 24"),
    ("model.path=/nowhere", "train", "no such folder (a Hugging Face folder"),
    ("trajectories.path=/nowhere.jsonl", "profile", "no such file or folder, and no match as a glob"),
    ("model.chat_template=chatml", "profile", "model.chat_template='chatml' is unknown"),
    ("domain.verifier.name=tool_call", "profile", "tool_call"),
    ("tracking.wandb=online", "train", "needs WANDB_API_KEY in your shell"),
    ("cluster.time_limit=soon", "train", "write D-HH:MM:SS"),
    ("cluster.partition='a b'", "train", "SLURM names have none"),
    ("cluster.container.kind=pyxis", "train", "needs cluster.container.image"),
    ("cluster.container={kind: apptainer, image: /nowhere.sif}", "train", "/nowhere.sif: no such file"),
    ("cluster.variables={MY_TOKEN: abc}", "train", "looks like a secret"),
    ("run_dir=/proc/nowhere", "train", "cannot write in /proc"),
    ("run.stages=[train,evaluate]", "evaluate", "evaluate.policies has sft"),
]


@pytest.mark.parametrize(("change", "job", "message"), BY_OVERRIDE, ids=[c for c, *_ in BY_OVERRIDE])
def test_a_broken_configuration(place: Place, change: str, job: str, message: str) -> None:
    found = told(place, job, change)
    assert any(message in text for text in found), found
    assert len(found) <= 4, found  # the cause, not an avalanche


BY_STATE = {
    "architecture": (lambda p: p.config(architectures=["Gpt2LMHeadModel"]), "architectures ['Gpt2LMHeadModel']"),
    "scaled positions": (lambda p: p.config(rope_scaling={"rope_type": "yarn"}), "rope type 'yarn' is not supported"),
    "no weights": (lambda p: (p.model / "model.safetensors").unlink(), "lacks weights"),
    "no tokenizer": (lambda p: (p.model / "tokenizer.json").unlink(), "a tokenizer"),
    "torn config": (lambda p: (p.model / "config.json").write_text("{"), "has no readable config.json"),
    "long turns": (lambda p: p.turns(40_000), "even the shortest turns"),
    "turns of another program": (
        lambda p: (p.turns(3), (p.run / "turns" / "turns.jsonl").write_text('{"a": 1}\n')),
        "a row is no turn",
    ),
    "a file as run_dir": (lambda p: p.run.write_text(""), "is a file; choose another run_dir"),
}


@pytest.mark.parametrize("name", BY_STATE)
def test_a_broken_place(place: Place, name: str) -> None:
    spoil, message = BY_STATE[name]
    spoil(place)
    found = told(place, "train")
    assert any(message in text for text in found), found


def test_a_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    free = checks.shutil.disk_usage(place.data)._replace(free=50 * 2**30)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: free)
    assert any("50.0 GiB free" in t and "checkpoints of 56.9 GiB" in t for t in told(place, "train"))


def test_a_foreign_profile(place: Place) -> None:
    overrides = place.overrides()

    def of_train_alone(*changes: str) -> str:
        alone = [Job("train", "stage.sh", ("train",))]
        return "\n".join(preflight.problems(load_config([*overrides, *changes]), alone, overrides))

    assert "summary.json does not exist: run the job `profile` first" in of_train_alone()
    place.profile(temperature=0.7)
    assert "sampling.temperature=1.0, but the profile was made with 0.7" in of_train_alone()
    assert of_train_alone("algorithm.allow_foreign_profile=true") == ""
    assert of_train_alone("sampling.temperature=0.7") == ""
    (place.run / "select" / "pivots.jsonl").write_text("")
    assert "has no pivots" in of_train_alone("sampling.temperature=0.7")


def test_an_interrupted_stage_of_another_configuration(place: Place) -> None:
    cfg = load_config([*place.overrides(), "seed=5"])
    stage_state.begin(cfg, place.run / "profile", stage_state.record_of(cfg, "profile", place.run))
    (place.run / "profile" / "rollouts.jsonl").touch()
    found = told(place, "profile")
    assert any("holds an interrupted profile" in t and "seed: 5 -> 0" in t for t in found)


def test_all_problems_come_in_one_list(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["preflight", "train", *place.overrides(), "cluster.time_limit=soon", "algorithm.group_size=1"])
    assert code == 2
    said = capsys.readouterr().err
    assert "2 problems before anything is queued" in said
    assert "time_limit" in said
    assert "group_size" in said


def test_layout_and_memory_are_printed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show-layout", "--rank", "7", *place.overrides()]) == 0
    shown = capsys.readouterr().out
    assert "parameters of the model: 30,532,122,624" in shown
    assert "rank 7: tensor" in shown
    assert "trainer" in shown and "KV cache of one sequence" in shown
    assert cli.main(["show-layout", "--rank", "x", *place.overrides()]) == 2
