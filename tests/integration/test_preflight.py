"""`pivotrl preflight`: thirty broken configurations and what it says of each, on the shape of Qwen3-30B-A3B."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.arms import ARMS
from experiments.plan import SHARED_STAGES
from launch import checks, preflight, storage
from launch.jobs import Job, jobs_for
from pivotrl import cli, stage_state
from pivotrl.configuration import load_config
from pivotrl.rendering.chat import Renderer
from pivotrl.stages import STAGES
from pivotrl.verifiers.registry import get_verifier
from tests.true_configs import NEMOTRON_3_SUPER, QWEN3_30B_A3B

QWEN3_30B = {**QWEN3_30B_A3B, "max_position_embeddings": 262144, "rope_theta": 10000000}  # Thinking-2507
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What docs/cluster.md starts, on 64 GPUs of 80 GiB.
SOUND = ("experiment=tau2", "cluster=h100", "cluster.nodes=8", "tracking=disabled")


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

    def profile(self, template: str | None = None, **sampling: Any) -> None:
        cfg = load_config(self.overrides())
        verifier = get_verifier(cfg.domain.verifier)
        now = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4096, **sampling}
        scored = {"name": verifier.name, "version": verifier.version, "config": verifier.config()}
        template = template or Renderer(self.model, None, cfg.domain.action_format).fingerprint()
        record = {"sampling": now, "verifier": scored, "template": template}
        for stage in ("profile", "select"):
            (self.run / stage).mkdir(parents=True, exist_ok=True)
        stage_state.begin(cfg, self.run / "profile", stage_state.record_of(cfg, "profile", self.run))
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


def test_a_sound_one_passes(place: Place) -> None:
    assert told(place, "pipeline") == []


BY_OVERRIDE = [
    # what is changed, job, what the message says
    ("parallel.pipeline=5", "train", "pipeline 5 x context 4 = 20 does not divide the world size 64"),
    ("parallel.expert=24", "train", "expert 24 x pipeline 4 = 96 does not divide the world size 64"),
    ("parallel.tensor=2", "train", "parallel.tensor=2 with a mixture of experts needs parallel.sequence=true"),
    ("parallel.tensor=16", "train", "needs parallel.sequence=true"),
    ("parallel.context=5", "train", "pipeline 4 x context 5 = 20 does not divide the world size 64"),
    ("cluster.nodes=3", "train", "does not divide the world size 24"),
    ("algorithm.pivots_per_step=62", "train", "is not a multiple of the data-parallel size 4"),
    ("algorithm.group_size=1", "train", "a group advantage needs at least 2 actions"),
    ("sampling.temperature=0", "profile", "every variance and every advantage would be 0"),
    ("sampling.max_new_tokens=40000", "profile", "leaves no room for a state"),
    ("model.context_length=300000", "profile", "exceeds the model's 262144 positions"),
    ("precision.fp8=mxfp8", "train", "needs a GPU of compute capability 10.0"),
    ("precision.fp8_first_layers_bf16=1", "train", "do nothing with precision.fp8=null"),
    ("generation.tensor_parallel=6", "profile", "generation.tensor_parallel=6 does not divide"),
    ("generation.gpu_memory_utilization=0.05", "profile", "the engine needs"),
    (
        "generation.tensor_parallel=1 generation.gpu_memory_utilization=0.95 cluster.gpu_memory_gib=64",
        "train",
        "memory: the refit needs",
    ),
    (
        "algorithm.optimizer={recompute: false, tokens_per_microbatch: 300000}",
        "train",
        "set algorithm.optimizer.recompute=true",
    ),
    ("sft.optimizer={recompute: false, tokens_per_microbatch: 200000}", "sft", "set sft.optimizer.recompute=true"),
    ("cluster.gpu_memory_gib=16", "train", "cluster.gpu_memory_gib is 16"),
    ("end_to_end.tasks_per_step=16 cluster.gpu_memory_gib=16", "e2e", "memory: e2e needs"),
    ("evaluate.policies=[e2e]", "evaluate", "run the job `e2e`, or set evaluate.policies=[]"),
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
    found = told(place, job, *re.split(r" (?=\w+[.\w]*=)", change))
    assert any(message in text for text in found), found
    assert len(found) <= 4, found  # the cause, not an avalanche


BY_STATE = {
    "architecture": (lambda p: p.config(architectures=["Gpt2LMHeadModel"]), "architectures ['Gpt2LMHeadModel']"),
    "scaled positions": (
        lambda p: p.config(rope_scaling={"rope_type": "longrope"}),
        "rope type 'longrope' is not supported",
    ),
    "no weights": (lambda p: (p.model / "model.safetensors").unlink(), "lacks weights"),
    "no tokenizer": (lambda p: (p.model / "tokenizer.json").unlink(), "a tokenizer"),
    "torn config": (lambda p: (p.model / "config.json").write_text("{"), "has no readable config.json"),
    "another vocabulary": (
        lambda p: p.config(vocab_size=100),
        "the tokenizer has 258 tokens, the model's vocabulary 100",
    ),
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


def test_a_quota(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "quota", lambda folder: storage.Room(20.0, 500))
    found = "\n".join(told(place, "train"))
    assert "20.0 GiB left of your quota" in found
    assert "500 files left of your quota" in found


def test_a_foreign_profile(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = place.overrides()

    def of_train_alone(*changes: str) -> str:
        alone = [Job("train", "stage.sh", ("train",))]
        return "\n".join(preflight.problems(load_config([*overrides, *changes]), alone, overrides))

    assert "summary.json does not exist: run the job `profile` first" in of_train_alone()
    place.profile(temperature=0.7)
    assert "sampling.temperature=1.0, but the profile was made with 0.7" in of_train_alone()
    assert of_train_alone("algorithm.allow_foreign_profile=true") == ""
    assert of_train_alone("sampling.temperature=0.7") == ""
    assert "scored by tool_calls" in of_train_alone("domain.verifier.name=strict")
    assert "config of the verifier tool_calls" in of_train_alone("domain.verifier.options={unordered: [f.x]}")
    assert "note: since the profile" not in capsys.readouterr().out
    (place.model / "model.safetensors").write_bytes(b"other")
    assert of_train_alone("sampling.temperature=0.7") == ""
    assert "note: since the profile, the files of model.path changed" in capsys.readouterr().out
    place.profile(template="of another")
    assert "the chat template, tokenizer or domain.action_format is not that of the profile" in of_train_alone()
    (place.run / "select" / "pivots.jsonl").write_text("")
    assert "has no pivots" in of_train_alone()


def test_an_interrupted_stage_of_another_configuration(place: Place) -> None:
    cfg = load_config([*place.overrides(), "seed=5"])
    stage_state.begin(cfg, place.run / "profile", stage_state.record_of(cfg, "profile", place.run))
    (place.run / "profile" / "rollouts.jsonl").touch()
    found = told(place, "profile")
    assert any("holds an interrupted profile" in t and "seed: 5 -> 0" in t for t in found)


def test_a_result_of_another_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config(place.overrides())
    stage_state.begin(cfg, place.run / "turns", stage_state.record_of(cfg, "turns", place.run))
    (place.run / "turns" / "summary.json").write_text("{}")
    monkeypatch.setattr(stage_state, "__version__", "99")
    found = told(place, "turns")
    assert any("turns was made by another version" in t and "run.accept_upgrade=true" in t for t in found), found
    assert told(place, "turns", "run.accept_upgrade=true") == told(place, "turns", "run.accept_upgrade=false") == []


def test_a_checkpoint_that_could_not_be_continued(place: Place) -> None:
    """Two steps of `train` are saved: another layout may go on with them, another group size or fewer steps may not."""
    cfg = load_config(place.overrides())
    stage_state.begin(cfg, place.run / "train", stage_state.record_of(cfg, "train", place.run))
    state = place.run / "train" / "state" / "step-00000002" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    assert told(place, "train", "parallel.expert=16", "tracking.name=x") == []
    found = told(place, "train", "algorithm.group_size=4")
    assert any("holds an interrupted train" in text and "algorithm.group_size: " in text for text in found), found
    found = told(place, "train", "algorithm.steps=1")
    assert any("algorithm.steps: " in text and "(2 steps are done)" in text for text in found), found


def test_all_problems_come_in_one_list(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["preflight", "train", *place.overrides(), "cluster.time_limit=soon", "algorithm.group_size=1"])
    assert code == 2
    said = capsys.readouterr().err
    assert "2 problems before anything is queued" in said
    assert "time_limit" in said
    assert "group_size" in said


QWEN3_235B = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "cluster.md"


def layouts() -> list[tuple[str, str, list[str]]]:
    """(experiment, cluster, overrides) of every row of the table of layouts in docs/cluster.md."""
    rows = re.findall(r"^\| (?:Qwen3|Nemotron)-\S+ \| ([\w, ]+) \| \d+ \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return [
        (experiment, cluster, re.findall(r"[\w.]+=[\w.]+", more))
        for clusters, more in rows
        for cluster in clusters.split(", ")
        for experiment in ("tau2", "swe", "terminal", "search")
    ]


@pytest.mark.parametrize(("experiment", "cluster", "more"), layouts(), ids=lambda v: v if isinstance(v, str) else "")
def test_documented_layouts_pass(place: Place, experiment: str, cluster: str, more: list[str]) -> None:
    large = bool(more)
    if "model=nemotron_3_super_120b_a12b" in more:
        place.config(**NEMOTRON_3_SUPER)
    elif large:
        place.config(**QWEN3_235B)
    changes = [f"experiment={experiment}", f"cluster={cluster}", *more]
    overrides = [o for o in place.overrides() if not o.startswith(("experiment=", "cluster"))]
    cfg = load_config([*overrides, *changes])
    assert cfg.cluster.nodes == (8 if large else 4)
    assert preflight.problems(cfg, jobs_for("pipeline"), [*overrides, *changes]) == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_a_job(place: Place, stage: str) -> None:
    """What it is told is of the configuration, and no crash."""
    told(place, stage, "environment=outfitters")


@pytest.mark.parametrize("name", ARMS)
def test_the_study_of_a_cluster_passes(place: Place, name: str) -> None:
    arm = ARMS[name]
    user = "environment.options.user={base_url: 'http://host:8001/v1', model: user}"
    given = [o for o in place.overrides() if not o.startswith(("experiment=", "cluster"))]
    more = ["sft.max_kl=0.1"] if arm.matches else []
    overrides = [*given, "experiment=study_tau2", "cluster=h100", user, *arm.overrides, *more]
    overrides.append(f"evaluate.policies=[{arm.policy}]")
    job = Job(name, "stage.sh", (*SHARED_STAGES, *arm.stages, "evaluate"))
    assert preflight.problems(load_config(overrides), [job], overrides) == []


def test_the_table_has_layouts() -> None:
    assert len(layouts()) == 4 * (3 + 3 + 3)


def test_a_model_that_cannot_be_trained(place: Place) -> None:
    place.config(**{**NEMOTRON_3_SUPER, "norm_topk_prob": False})
    found = told(place, "train", "model=nemotron_3_super_120b_a12b")
    assert any("norm_topk_prob" in text for text in found), found


def test_the_command_starts_no_engine(place: Place) -> None:
    """The whole process, as on a login node: 64 GPUs, Qwen3-30B-A3B; neither engine's minute of imports."""
    code = (
        "import sys; from pivotrl import cli; cli.main(sys.argv[1:]); "
        "print('engines:', *sorted({'vllm', 'megatron', 'wandb'} & set(sys.modules)))"
    )
    program = (sys.executable, "-c", code, "preflight", *place.overrides())
    done = subprocess.run(program, capture_output=True, text=True, cwd=DOCUMENT.parents[1], check=False)
    assert "on 64 processes" in done.stdout or "sbatch" in done.stderr, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "engines:"


def test_the_ten_commands(place: Place) -> None:
    """Of docs/cluster.md: what they set passes preflight, and the programs they start are there or SLURM's."""
    block = re.search(r"```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block
    assert [int(n) for n in re.findall(r"# (\d+)", block[1])] == list(range(1, 11))
    stubs = "git() { :; }; cd() { :; }; .() { :; }; df() { :; }; tail() { :; }; sbatch() { :; }; sinfo() { :; }\n"
    stubs += 'make() { echo "make $*"; }; pivotrl() { echo "pivotrl $*"; }\n'
    said = subprocess.run(
        ["bash", "-c", stubs + block[1].replace("<this repository>", "url")], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    make, first, second = said.stdout.splitlines()
    assert (
        subprocess.run(["make", "-n", *make.split()[1:]], cwd=DOCUMENT.parents[1], capture_output=True).returncode == 0
    )
    assert first.split()[1] == "preflight"
    assert second.split()[1:3] == ["launch", "pipeline"]
    assert first.split()[2:] == second.split()[3:]
    given = {"run_dir": place.run, "model.path": place.model, "trajectories.path": place.data}
    overrides = [w if (k := w.split("=")[0]) not in given else f"{k}={given[k]}" for w in first.split()[2:]]
    assert preflight.problems(load_config(overrides), jobs_for("pipeline"), overrides) == []


def test_symptoms_of_our_own_are_words_that_the_code_says() -> None:
    table = DOCUMENT.read_text().split("## Symptom, cause, remedy")[1]
    symptoms = re.findall(r"^\| (?:code \d+, )?`([^`]+)`", table, re.MULTILINE)
    sources = [p for folder in ("launch", "pivotrl") for p in (DOCUMENT.parents[1] / folder).rglob("*.[ps][yh]")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(p.read_text() for p in sources))
    slurms = ("Invalid account", "invalid partition", "Requested node", "unrecognized option", "module:", "No module")
    for symptom in symptoms:
        for part in symptom.split(" ... "):
            words = part.removeprefix("node check: ").removeprefix("node check:")
            if not symptom.startswith(slurms) and words not in ("slurm/common.sh: No such file", "No space left"):
                assert words in code or words.removesuffix(", 8 expected") in code, words
    assert len(re.findall(r"^\| ", table, re.MULTILINE)) - 1 >= 20


def test_layout_and_memory_are_printed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show-layout", "--rank", "7", *place.overrides()]) == 0
    shown = capsys.readouterr().out
    assert "parameters of the model: 30,532,122,624" in shown
    assert "rank 7: tensor" in shown
    assert "trainer" in shown and "KV cache of one sequence" in shown
    assert cli.main(["show-layout", "--rank", "x", *place.overrides()]) == 2
