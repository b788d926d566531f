"""The texts of `--help`: plain strings, so that they come up in a moment."""

from __future__ import annotations

from pivotrl import __version__

OTHER_COMMANDS = {
    "run": "The whole pipeline, each stage in its own process; run it again to continue after an interruption.",
    "preflight": "Everything that can be known before queueing a job, in one list with remedies.",
    "launch": "Render the sbatch script of a job (or of the pipeline), print or submit it.",
    "show-layout": "Print what each rank of the job holds and the estimate of its memory; needs no GPU.",
    "verify": "Score a file of rows with a verifier: no model, no engine.",
    "show": "Print one turn of a run for a person: state, demonstrated action, flags, end of the prompt as tokens.",
    "export-gym": "Write the selected pivots of a run as NeMo-Gym rows.",
    "fetch-model": "Unpack a built-in model and print its folder.",
    "show-config": "Print the resolved configuration, and the conflicts in it.",
}
_HELP = {
    "run": """Reads   what the first stage reads (trajectories.path, or the expert of an environment)
Writes  <run_dir>/<stage>/ for each of run.stages, <run_dir>/pipeline.json, <run_dir>/report/report.html

A stage whose configuration, inputs and upstream results are unchanged is skipped. A changed one is run again with
all that depends on it; its old folder moves to <run_dir>/superseded/.

Key overrides: experiment=demo|tau2|swe|terminal|search, trajectories.path, model=..., run_dir, run.stages
Example:       pivotrl run experiment=demo""",
    "show-layout": """Reads   the model's config.json; loads no weights

--rank N adds the place of one rank in every group.

Key overrides: parallel=..., cluster=..., cluster.nodes, model=..., precision=...
Example:       pivotrl show-layout parallel=tp4_pp8_ep8 cluster=h100 cluster.nodes=128 model.path=/models/Qwen3-235B""",
    "verify": """Reads   --input FILE    JSONL rows {"id"?, "domain"?, "tools"?, "state"?: [messages],
                        "expected": message, "completion": text|message}
Writes  --output FILE   one row for each, in order: {"id"?, "reward": 0 to 1 or null (unscorable), "reason"}

Without domain=..., domain.* and experiment=..., a row's "domain" chooses among the files of conf/domain/ (terminal,
swe, search, tau2, ...); rows of other names are judged by the default.

Key overrides: domain=..., domain.verifier.name, domain.verifier.options
Example:       pivotrl verify --input rows.jsonl --output scored.jsonl domain=tau2""",
    "show": """usage: pivotrl show TURN_ID run_dir=DIR [model=...]

Reads   <run_dir>/turns/turns.jsonl, and profile/turns.jsonl where there is one
A model (model=..., model.path=..., model.chat_template=...) adds the tokens at the end of the prompt.

Example:       pivotrl show 'airline_3#4' run_dir=runs/demo model=smollm2_135m""",
    "export-gym": """Reads   <run_dir>/select/pivots.jsonl, <run_dir>/turns/turns.jsonl
Writes  --output FILE   JSONL rows: responses_create_params, expected_action, agent_ref, pass_rate, ...

--agent NAME is the agent_ref of the rows, a name in NeMo-Gym's configuration (needed for Terminus turns; default:
single_step_tool_use_with_argument_comparison_agent).

Key overrides: run_dir
Example:       pivotrl export-gym run_dir=runs/demo --output pivots.jsonl""",
    "fetch-model": """Writes  the model's folder in the user's cache; prints its path

Key overrides: model=... (a model whose path is builtin:NAME)
Example:       pivotrl fetch-model model=smollm2_135m""",
    "show-config": """Key overrides: any
Example:       pivotrl show-config experiment=tau2 trajectories.path=data.jsonl model.path=/models/Qwen3-30B-A3B""",
}


def overview() -> str:
    """The help of `pivotrl` itself."""
    from pivotrl.stages import STAGES

    rows = [(s.name, s.summary) for s in STAGES.values()] + list(OTHER_COMMANDS.items())
    listed = "\n".join(f"  {name:14} {text}" for name, text in rows)
    return f"""usage: pivotrl <stage> [key=value ...]

PivotRL {__version__}: turn-level reinforcement learning for agentic models from existing SFT trajectories.

{listed}

Overrides are Hydra's: a group (model=smollm2_135m) or a key (algorithm.steps=100); relative paths mean this folder.
`pivotrl <stage> --help` says what a stage reads and writes. --config-dir DIR adds your own groups of YAML files.

  pivotrl run experiment=demo
  pivotrl run trajectories.path=data.jsonl run_dir=runs/mine"""


def stage_help(command: str) -> str:
    """The help of one stage."""
    from pivotrl.stages import STAGES

    if command not in STAGES:
        from launch.commands import HELP

        words = " JOB" if command == "launch" else " [JOB]" if command == "preflight" else ""
        text = HELP.get(command) or _HELP[command]
        return f"usage: pivotrl {command}{words} [key=value ...]\n\n{OTHER_COMMANDS[command]}\n\n{text}"
    s = STAGES[command]
    return f"""usage: pivotrl {s.name} [key=value ...]

{s.summary}

Reads   {s.reads}
Writes  {s.writes}   (under <run_dir>/)

Key overrides: {", ".join(s.overrides)}
Example:       {s.example}"""
