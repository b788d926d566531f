"""`pivotrl <stage> [Hydra overrides]`: the one command. Imports nothing heavy before a stage needs it.

Exit codes: 0 done; 2 bad input or configuration (told on stderr); 1 crash (traceback in <run_dir>/crash.log);
3 no progress (pivotrl.watchdog); 75 saved and stopped, by SIGTERM, SIGUSR1 or a deadline (pivotrl.stopping);
130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pivotrl import __version__
from pivotrl.cli_help import OTHER_COMMANDS, overview, stage_help
from pivotrl.errors import UserError
from pivotrl.io import keeps_books
from pivotrl.state_folder import UNWRITABLE, remedy
from pivotrl.stopping import EXIT_STOPPED, Stopped, leave_note, watching
from pivotrl.watchdog import watchdog


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    context: dict[str, Any] = {}
    try:
        return _dispatch(command, rest, context)
    except UserError as error:
        print(f"pivotrl {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"pivotrl {command}: interrupted; the same command continues", file=sys.stderr)
        return 130
    except Stopped as stopped:
        print(f"pivotrl {command}: stopped ({stopped.why}); the same command continues", file=sys.stderr)
        leave_note(stopped.why)
        return EXIT_STOPPED
    except BrokenPipeError:
        # The reader of our output went away (`pivotrl ... | head`); keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            place = Path(error.filename or context.get("run_dir") or ".")
            print(f"pivotrl {command}: {remedy(error, place)}. The same command continues", file=sys.stderr)
            return 2
        log = _write_crash(context.get("run_dir"), command)
        print(
            f"pivotrl {command}: crashed: {type(error).__name__}: {_one_line(error)}. Traceback: {log}", file=sys.stderr
        )
        return 1


def _dispatch(command: str, rest: list[str], context: dict[str, Any]) -> int:
    if command in ("-h", "--help", "help"):
        print(overview(), flush=True)
        return 0
    if command in ("-V", "--version"):
        print(f"pivotrl {__version__}")
        return 0
    from pivotrl.stages import STAGES

    if command not in STAGES and command not in OTHER_COMMANDS:
        from pivotrl.strict import suggestion

        known = [*STAGES, *OTHER_COMMANDS]
        raise UserError(f"no such stage.{suggestion(command, known)} There are: {', '.join(known)}")
    if "-h" in rest or "--help" in rest:
        print(stage_help(command))
        return 0
    if command in ("preflight", "launch"):
        from launch import commands

        return commands.main(command, rest)
    turn_id, rest = (rest[0], rest[1:]) if command == "show" and rest else ("", rest)
    options, overrides = _options(command, rest)
    from pivotrl.configuration import load_config

    cfg = load_config(overrides)
    context["run_dir"] = Path(cfg.run_dir)
    if command == "audit-verifier":
        _ensure_turns(cfg, context["run_dir"])
    if command in STAGES:
        return run_stage(command, cfg, context["run_dir"])
    if command == "run":
        from pivotrl.pipeline import run

        return run(cfg, overrides)
    if command == "show":
        if not turn_id or turn_id.startswith(("--", "run_dir=")):
            raise UserError("give the turn's id first (see `pivotrl show --help`)")
        from pivotrl.turn_tools import show_turn

        print(show_turn(cfg, turn_id, any(item.startswith("model") for item in overrides)))
        return 0
    handlers: dict[str, Callable[[Any, dict[str, str]], int]] = {
        "verify": lambda cfg, options: _verify(cfg, options, overrides),
        "export-gym": _export_gym,
        "fetch-model": _fetch_model,
        "show-config": _show_config,
        "show-layout": _show_layout,
    }
    return handlers[command](cfg, options)


def _options(command: str, rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options (`--config-dir`, and those of the command) and Hydra overrides, in any order."""
    own = {"show-layout": ("rank",), "verify": ("input", "output"), "export-gym": ("output", "agent")}
    known = (*own.get(command, ()), "config-dir")
    options: dict[str, str] = {}
    overrides: list[str] = []
    items = iter(rest)
    for item in items:
        if not item.startswith("--"):
            if "=" not in item and not item.startswith("~"):
                raise UserError(f"'{item}' is no override; write key=value (see `pivotrl {command} --help`)")
            overrides.append(item)
            continue
        name, given, value = item[2:].partition("=")
        if name not in known:
            raise UserError(f"no option --{name}; overrides are written key=value (see `pivotrl {command} --help`)")
        options[name] = value if given else next(items, "")
        if not options[name]:
            raise UserError(f"--{name} needs a value")
    if folder := options.get("config-dir"):
        from pivotrl.configuration import search_folder

        overrides.append(search_folder(folder))
    return options, overrides


def run_stage(stage: str, cfg: Any, run_dir: Path) -> int:
    """Run one stage in this process, after checking that its folder belongs to this configuration."""
    from pivotrl.configuration import validate
    from pivotrl.stages import STAGES

    validate(cfg, stage)
    # megatron-core, torch and transformers warn of what we know (no Transformer Engine here, renamed calls)
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\b")
    minutes = cfg.checkpoint.watchdog_minutes
    with watching(cfg.checkpoint), watchdog(minutes and 60 * minutes, stage, run_dir):
        if keeps_books():
            _run_with_books(stage, cfg, run_dir)
        else:
            _meet(stage)
            STAGES[stage].load()(cfg, run_dir)
    return 0


def _meet(stage: str) -> None:
    """Several processes: until all are here and the first has opened the books, so that all find the same files."""
    from pivotrl.stages import STAGES

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and STAGES[stage].parallel:
        from pivotrl.policy import agree

        agree.join()
        agree.wait()


def _run_with_books(stage: str, cfg: Any, run_dir: Path) -> None:
    from pivotrl import stage_state
    from pivotrl.locks import hold
    from pivotrl.stages import STAGES

    started, place = time.monotonic(), stage_state.place_of(cfg, stage)
    directory = run_dir / place
    with hold(run_dir / ".locks" / place.replace("/", "-")):
        record = stage_state.record_of(cfg, stage, run_dir)
        if stage == "profile" and place != stage and (why := stage_state.why_stale(cfg, run_dir / stage, record)):
            raise UserError(
                f"{run_dir / stage} holds a {stage} of another configuration, which the shards' merge would replace:\n"
                + "\n".join(f"  {line}" for line in why)
                + "\nMove that folder away, or choose another run_dir=..."
            )
        if why := stage_state.why_stale(cfg, directory, record):
            _make_way(run_dir, place, why)
        stage_state.begin(cfg, directory, record)
        _meet(stage)
        summary = STAGES[stage].load()(cfg, run_dir)
    _print_summary(stage, summary, directory, time.monotonic() - started)


def _ensure_turns(cfg: Any, run_dir: Path) -> None:
    """Cut the turns of `trajectories.path` where the run has none; turns that are there are used as they are."""
    from pivotrl import stage_state

    turns = run_dir / "turns"
    if not stage_state.is_done(turns):
        run_stage("turns", cfg, run_dir)
        return
    made = (stage_state.read_record(turns) or {}).get("inputs")
    if cfg.trajectories.path is not None and made != stage_state.record_of(cfg, "turns", run_dir)["inputs"]:
        raise UserError(
            f"{turns} holds the turns of other files than trajectories.path={cfg.trajectories.path}. "
            "Leave trajectories.path out to audit on those, or choose another run_dir=..."
        )


def _make_way(run_dir: Path, place: str, why: list[str]) -> None:
    """A finished result of another configuration moves aside; interrupted work is not mixed with ours: refused."""
    from pivotrl import stage_state

    directory, listed = run_dir / place, "\n".join(f"  {line}" for line in why)
    if not stage_state.is_done(directory):
        raise UserError(
            f"{directory} holds an interrupted {place} of another configuration:\n{listed}\n"
            "Undo the change to continue it, choose another run_dir=..., or move that folder away."
        )
    aside = stage_state.set_aside(run_dir, place)
    print(f"{place}: its former result is now in {aside}, because\n{listed}", file=sys.stderr, flush=True)


def _print_summary(stage: str, summary: Mapping[str, Any], directory: Path, seconds: float) -> None:
    facts = []
    for key, value in summary.items():
        inner = value.items() if isinstance(value, Mapping) and key != "fingerprint" else [("", value)]
        facts += [f"{key}{'.' if k else ''}{k}={_number(v)}" for k, v in inner if isinstance(v, int | float | str)]
    shown = f" ({', '.join(facts[:8])})" if facts else ""
    print(f"{stage}: done in {seconds:.1f} s -> {directory}{shown}", flush=True)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show_layout(cfg: Any, options: dict[str, str]) -> int:
    from launch import report

    rank = options.get("rank")
    if rank is not None and not rank.isdecimal():
        raise UserError(f"--rank {rank}: give the number of a rank")
    print(report.layout(cfg, None if rank is None else int(rank)))
    print(report.estimate(cfg))
    return 0


def _verify(cfg: Any, options: dict[str, str], overrides: list[str]) -> int:
    for name in ("input", "output"):
        if name not in options:
            raise UserError(f"give --{name} FILE (see `pivotrl verify --help`)")
    from pivotrl.configuration import domain_by_name
    from pivotrl.io import write_jsonl
    from pivotrl.verifiers.rows import verify_rows

    of_domain = domain_by_name(cfg, overrides)
    source, counts = Path(options["input"]), {"right": 0, "wrong": 0, "partial": 0, "unscorable": 0}

    def scored() -> Iterator[Any]:
        for row in verify_rows(_json_lines(source), cfg.domain.verifier, cfg.domain.action_format, of_domain):
            reward = row["reward"]
            kind = "unscorable" if reward is None else {1.0: "right", 0.0: "wrong"}.get(reward, "partial")
            counts[kind] += 1
            yield row

    total = write_jsonl(Path(options["output"]), scored())
    print(f"verify: {total} rows ({', '.join(f'{n} {k}' for k, n in counts.items() if n)}) -> {options['output']}")
    return 0


def _export_gym(cfg: Any, options: dict[str, str]) -> int:
    if "output" not in options:
        raise UserError("give --output FILE (see `pivotrl export-gym --help`)")
    from pivotrl.turn_tools import export_gym

    counts = export_gym(Path(cfg.run_dir), Path(options["output"]), options.get("agent"))
    left_out = "".join(f", {n} left out: {reason}" for reason, n in counts["left_out"].items())
    print(f"export-gym: {counts['rows']} rows{left_out} -> {options['output']}")
    return 0


def _json_lines(path: Path) -> Iterator[Any]:
    """Values of a JSONL file. A line that is no (strict) JSON keeps its place, as a bad row with its reason."""
    from pivotrl.trajectories import strict_json
    from pivotrl.verifiers.rows import BadLine

    if not path.is_file():
        raise UserError(f"--input {path}: no such file")
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                try:
                    yield strict_json.loads(line)
                except (strict_json.StrictJsonError, RecursionError) as error:
                    yield BadLine(str(error)[:300], _id_of(line))


def _id_of(line: bytes) -> str | int | None:
    """The id of a row that is JSON, though not strictly; None where it has none that can be written."""
    import json

    try:
        row = json.loads(line)
        identity = row.get("id") if isinstance(row, dict) else None
        str(identity).encode()
    except (ValueError, RecursionError):
        return None
    return identity if type(identity) in (str, int) else None


def _fetch_model(cfg: Any, options: dict[str, str]) -> int:
    if not cfg.model.path.startswith("builtin:"):
        raise UserError(f"model.path={cfg.model.path} is no built-in model; there is nothing to fetch")
    from pivotrl.models.builtin import fetch_model

    print(fetch_model(cfg.model.path.removeprefix("builtin:")))
    return 0


def _show_config(cfg: Any, options: dict[str, str]) -> int:
    from dataclasses import asdict

    import yaml

    from pivotrl.validation import conflicts

    print(yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True), end="")
    if found := conflicts(cfg):
        print("# Conflicts, were this run here and now:\n" + "\n".join(f"#   - {text}" for text in found))
    return 0


def _write_crash(run_dir: Path | None, command: str) -> Path:
    """Append the traceback to crash.log of the run (of this folder, when the run is not known yet)."""
    folder = run_dir or Path.cwd()
    rank = os.environ.get("RANK")
    path = folder / (f"crash.rank{rank}.log" if rank else "crash.log")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pivotrl {command}\n{traceback.format_exc()}\n")
    except OSError:
        traceback.print_exc()  # a full or read-only disk: the terminal is all that is left
    return path


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "(no message)"


if __name__ == "__main__":
    sys.exit(main())
