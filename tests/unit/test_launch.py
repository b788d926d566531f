"""Rendering of scripts, the estimate of memory, the verdict of the node check."""

from __future__ import annotations

import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from launch import jobs, memory, node_check, render, step
from pivotrl import cli
from pivotrl.config import Config
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.stages import STAGES
from tests.true_configs import NEMOTRON_3_SUPER, QWEN3_30B_A3B

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "attention_bias": True},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
}


def scripts() -> list[Path]:
    return [ROOT / "slurm" / job.script for job in jobs.JOBS.values()]


@pytest.mark.parametrize("job", jobs.JOBS.values(), ids=lambda j: j.name)
def test_scripts_and_launcher_run_the_same_stages(job: jobs.Job) -> None:
    text = (ROOT / "slurm" / job.script).read_text()
    assert f"stages=({' '.join(job.stages)})" in text
    assert f"--job-name=pivotrl-{job.name}\n" in text
    assert all(name in STAGES for name in job.stages)


@pytest.mark.parametrize(
    "path", [*scripts(), *(ROOT / "slurm" / f"{n}.sh" for n in ("stage", "convert"))], ids=lambda p: p.name
)
def test_headers_come_before_the_first_command(path: Path) -> None:
    """SLURM ignores `#SBATCH` lines after it, without a word."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    export = next(line for line in lines if line.startswith("#SBATCH --export="))
    assert export.removeprefix("#SBATCH --export=").split(",") == Config().cluster.environment


def test_array_tasks_are_shards_of_one_profile(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "common.sh").write_text('echo "${stages[*]} $*"')
    environment = {"PIVOTRL_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin"}
    array = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "8"}
    command = ["bash", str(ROOT / "slurm" / "profile_pivot.sh"), "seed=1"]
    for more, words in (({}, "turns warmup profile select seed=1"), (array, "profile seed=1 profile.shard=2/8")):
        said = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=True).stdout
        assert said.strip() == words


def rendered(*overrides: str, job: str = "train") -> str:
    cfg = load_config(overrides)
    return render.script(cfg, jobs.JOBS[job], overrides, Path(cfg.run_dir) / "slurm")


def test_a_script_has_what_the_cluster_says() -> None:
    text = rendered(
        "cluster=h100",
        "cluster.partition=gpu",
        "cluster.account=me",
        "cluster.modules=['module load cuda/12.8']",
        "cluster.variables={NCCL_IB_HCA: 'mlx5_0,mlx5_1'}",
        "run_dir=/data/my run",
    )
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        '#SBATCH --output="/data/my run/slurm/%x-%j.log"',
        "stages=(turns warmup profile select train)",
        "module load cuda/12.8",
        "export NCCL_IB_HCA=mlx5_0,mlx5_1",
    ):
        assert line in text.splitlines()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_containers() -> None:
    pyxis = rendered("cluster=h100", "cluster.container={kind: pyxis, image: /i.sqsh, mounts: [/data]}", "run_dir=/r")
    assert re.search(r"srun_flags=\(--container-image=/i.sqsh --container-mounts=/data:/data,/r:/r,\S+ ", pyxis)
    assert "container=()" in pyxis
    assert "python=python3" in pyxis
    apptainer = rendered("cluster=h100", "cluster.container={kind: apptainer, image: /i.sif}", "run_dir=/r")
    assert re.search(r"container=\(apptainer exec --pwd \S+ --nv --bind /r .*/i.sif\)", apptainer)
    assert "srun_flags=()" in apptainer


def test_scripts_and_launcher_ask_slurm_for_the_same_things() -> None:
    """What a script of slurm/ asks for, `launch` asks for as well; what is no matter of the site, in the same words."""
    cfg = load_config(["cluster=h100"])
    for job in jobs.JOBS.values():
        text = (ROOT / "slurm" / job.script).read_text()
        asked = re.findall(r"^#SBATCH (--[\w-]+)(.*)$", text, re.MULTILINE)
        rendered_flags = dict(
            re.fullmatch(r"#SBATCH (--[\w-]+)(.*)", line).groups() for line in render.header(cfg, job, Path("."))
        )
        for flag, value in asked:
            assert flag in rendered_flags
            if flag not in ("--nodes", "--output"):
                assert rendered_flags[flag] == value


@pytest.mark.parametrize("kind", ["none", "pyxis", "apptainer"])
def test_processes_start_in_each_kind_of_container(tmp_path: Path, kind: str) -> None:
    """The words that srun gets, with a space in a path."""
    run, here = tmp_path / "my run", Path.cwd()
    container = {
        "none": [],
        "pyxis": ["cluster.container={kind: pyxis, image: /i.sqsh, mounts: [/data]}", "cluster.variables={UCX_A: 1}"],
        "apptainer": ["cluster.container={kind: apptainer, image: /i.sif, mounts: ['/data:/in']}"],
    }[kind]
    cfg = load_config(
        ["cluster=h100", f"run_dir='{run}'", "model.path=/models/m", "trajectories.path=/t/x.jsonl", *container]
    )
    for name, text in (("srun", 'printf "%s\\n" "$@" >"$LOG"'), ("scontrol", "echo node1"), ("squeue", "true")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "8", "LOG": str(tmp_path / "words")}
    script = f"{render.settings(cfg)}\nstages=()\nset --\n{render.BODY.read_text()}"
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", script], env={"PATH": path, **slurm}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["--export=ALL", "--kill-on-bad-exit=1", "--wait=0"]
    binds = ["/data:/in", str(run), "/models/m", "/t", str(here)]
    assert (
        words[3:-2]
        == {
            "none": [sys.executable],
            "pyxis": [
                "--container-image=/i.sqsh",
                f"--container-mounts=/data:/data,{run}:{run},/models/m:/models/m,/t:/t,{here}:{here}",
                f"--container-workdir={here}",
                "--container-env=" + ",".join(cfg.cluster.variables),
                "python3",
            ],
            "apptainer": [
                *("apptainer", "exec", "--pwd", str(here), "--nv"),
                *(word for bind in binds for word in ("--bind", bind)),
                *("/i.sif", "python3"),
            ],
        }[kind]
    )
    assert words[-2:] == ["-m", "launch.node_check"]


def test_odd_overrides_stay_words() -> None:
    text = rendered("tracking.name='a b; rm -rf $HOME'")
    line = next(line for line in text.splitlines() if line.startswith("set -- "))
    shown = subprocess.run(["bash", "-c", f'{line}; echo "$#:$1"'], capture_output=True, text=True, check=True).stdout
    assert shown == "1:tracking.name='a b; rm -rf $HOME'\n"


def test_secrets_and_bad_names_are_refused() -> None:
    cfg = Config()
    cfg.cluster.variables = {"WANDB_API_KEY": "k", "A-B": 1}
    cfg.cluster.environment = ["GOOD", "A=1"]
    cfg.cluster.partition = "x\n#SBATCH --wrap=bad"
    text = "\n".join(render.conflicts(cfg))
    for part in ("WANDB_API_KEY looks like a secret", "'A-B' is no variable", "'A=1' is no variable", "white space"):
        assert part in text


def test_unknown_jobs_get_a_suggestion() -> None:
    with pytest.raises(UserError, match="Did you mean 'train'"):
        jobs.jobs_for("trian")
    assert jobs.jobs_for("turns")[0].stages == ("turns",)


def test_dry_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "pipeline", "--dry-run", "experiment=smoke", f"run_dir={tmp_path}/run"]) == 0
    assert re.findall(r"--job-name=pivotrl-(\w+)", capsys.readouterr().out) == ["profile", "train", "sft", "evaluate"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_parameters_are_those_of_the_mapping(architecture: str) -> None:
    from pivotrl.models.mapping import plan
    from pivotrl.models.registry import family_for

    config = {**SIZES, **CONFIGS[architecture], "architectures": [architecture]}
    family = family_for(config)
    total = 0
    for entry in plan(family.rules, family.dims(config)).values():
        for shape in entry.shapes:
            size = 1
            for n in shape:
                size *= n
            total += size
    assert memory.read_model(config).weights.total == total


def test_weights_of_a_hybrid_are_those_of_its_mapping() -> None:
    from pivotrl.models.mapping import plan
    from pivotrl.models.registry import family_for

    family, found = family_for(NEMOTRON_3_SUPER), memory.read_model(NEMOTRON_3_SUPER)
    total = sum(prod(shape) for e in plan(family.rules, found.dims).values() for shape in e.shapes)
    assert found.weights.total == total == 120_668_707_840
    assert found.attentions == 8


def test_virtual_stages_and_states_on_the_host_change_the_estimate() -> None:
    config = {**SIZES, **CONFIGS["Qwen3MoeForCausalLM"]}
    model, cfg = memory.read_model(config), load_config([])
    cfg.parallel.pipeline, cfg.algorithm.optimizer.recompute = 4, False
    plain = memory.activation_bytes(model, cfg, 1000)
    cfg.parallel.virtual_pipeline = 2
    # the first stage holds 2 * 3 + 4 + 1 chunks of an eighth of the depth
    assert memory.activation_bytes(model, cfg, 1000) == pytest.approx(plain * 11 / 8)
    model = memory.read_model(QWEN3_30B_A3B)
    here = memory.training_gib(model, cfg, 8)
    cfg.algorithm.optimizer.cpu_offload = True
    away = memory.training_gib(model, cfg, 8)
    room = here["activations"] + here["scores"]
    assert 0 < away["optimiser"] == pytest.approx(here["optimiser"] - room)


def test_layouts_share_memory() -> None:
    config = {**SIZES, **CONFIGS["Qwen3MoeForCausalLM"]}
    model, cfg = memory.read_model(config), load_config([])
    cfg.algorithm.optimizer.recompute = False
    alone = memory.training_gib(model, cfg, 1)
    n = model.weights.total
    assert alone["weights"] == pytest.approx(2 * n / 2**30)
    assert alone["gradients"] == pytest.approx(4 * n / 2**30)
    assert alone["optimiser"] == pytest.approx(12 * n / 2**30)
    many = memory.training_gib(model, cfg, 8)
    assert many["optimiser"] == pytest.approx(alone["optimiser"] / 8)
    assert many["weights"] == alone["weights"]
    cfg.parallel.expert = 8
    assert memory.training_gib(model, cfg, 8)["weights"] < alone["weights"]
    cfg.algorithm.optimizer.recompute = True
    assert memory.training_gib(model, cfg, 8)["activations"] < alone["activations"] / 2


def facts(**changes: Any) -> node_check.Facts:
    return node_check.Facts(**{"host": "n1", "clock": 100.0, "gpus": 8, "free_gpu": 0.99, "token": "t", **changes})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"gpus": 7}, "7 GPUs visible, 8 expected"),
        ({"free_gpu": 0.4}, "only 40% of its GPU's memory is free"),
        ({"token": None}, "does not see /shared"),
        ({"token": "another"}, "does not see /shared"),
        ({"clock": 160.0}, "its clock is +60 s off"),
    ],
)
def test_node_check_names_the_bad_node(bad: dict[str, Any], message: str) -> None:
    everyone = {0: facts(host="n0"), 1: facts(host="n1", **bad), 2: facts(host="n2")}
    found = node_check.faults(everyone, dict.fromkeys(everyone, 100.5), 8, "t", "/shared")
    assert len(found) == 1
    assert found[0].startswith("node n1 (process 1): ")
    assert message in found[0]


def test_silent_processes_are_placed_on_their_nodes() -> None:
    assert node_check.silent([2, 3, 4], ["a", "b", "c"], 6) == "node b (process 2, 3), node c (process 4)"


def test_ranks_come_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    monkeypatch.setattr(os, "environ", dict(env))
    step.rank_from_slurm()
    assert [os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]
    monkeypatch.setattr(os, "environ", {**env, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
    step.rank_from_slurm()
    assert "RANK" not in os.environ
    assert [s for s in STAGES if not STAGES[s].parallel] == ["turns", "audit-verifier", "select", "report"]
