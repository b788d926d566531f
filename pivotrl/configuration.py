"""Composes the configuration with Hydra, strictly: nothing that the schema does not know gets through.

Hydra composes the YAML groups of `conf/`; `pivotrl.strict` then reads the result into `pivotrl.config.Config`, so that
every unknown key and wrong type is told at once, with its place, `+` and `++` included (Hydra itself accepts those).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pivotrl.config import Config, Domain
from pivotrl.errors import UserError
from pivotrl.stages import BENIGN_KEYS, STAGES
from pivotrl.strict import MISSING_VALUE, Problem, build, is_known, nearest, suggestion, unknown_key
from pivotrl.validation import validate

__all__ = [
    "config_dir",
    "differences",
    "load_config",
    "save_resolved",
    "search_folder",
    "subset",
    "upgraded",
    "validate",
]

_PATH_KEYS = ("run_dir", "trajectories.path", "model.path", "evaluate.ood_path")
_SEARCH_PATH = "hydra.searchpath"
RESOLVED_NAME = "config.yaml"


def config_dir() -> Path:
    """The folder of Hydra groups: inside an installed wheel, else beside the package (a checkout)."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"{package}: the configuration folder 'conf' is missing; reinstall pivotrl")


def load_config(overrides: Iterable[str] = ()) -> Config:
    """Compose `conf/` with Hydra `overrides` into a `Config` with absolute paths. Does not `validate` it.

    Raises `UserError` that lists all faults of one kind: bad overrides, unknown keys, wrong types, missing values.
    """
    overrides = list(overrides)
    folders = [config_dir(), *_searched(overrides)]
    groups = _groups(folders)
    prepared, given = _prepare(overrides, groups)
    if "domain.verifier.name" in given:  # the options in the domain's file are those of the domain's own verifier
        prepared.insert(0, "++domain.verifier.options=null")
    try:
        values, choices = _compose(prepared)
    except UserError:
        # A misspelt keyword in a defaults list also surfaces as something else; tell the cause, not that.
        _check_defaults([f for folder in folders for f in sorted(folder.rglob("*.yaml"))], groups)
        raise
    files = _chosen_files(folders, choices)
    _check_defaults(files, groups)
    problems: list[Problem] = []
    cfg = build(Config, values, problems)
    _raise(problems, given, files)
    _absolute(cfg)
    return cfg


def domain_by_name(cfg: Config, overrides: Iterable[str]) -> Callable[[str], Domain | None] | None:
    """For rows that name their domain: name of a file in `conf/domain/` -> that domain; any other name -> None.

    None where `overrides` choose or change the domain (`domain=`, `domain.*`, `experiment=`), which is meant then.
    """
    overrides = list(overrides)
    if any(re.match(r"[+~]*(domain|experiment)\b", text) for text in overrides):
        return None
    names = _groups([config_dir(), *_searched(overrides)]).get("domain", [])

    def find(name: str) -> Domain | None:
        if name not in names or name == cfg.domain.name:
            return None
        return load_config([f"domain={name}", *overrides]).domain

    return find


def search_folder(folder: str | Path) -> str:
    """The override by which a folder of the user's own groups is searched, too (`--config-dir`)."""
    return f"{_SEARCH_PATH}=[file://{Path(folder).resolve()}]"


def _searched(overrides: list[str]) -> list[Path]:
    """Folders of `hydra.searchpath=[file:///...]`: a user's own groups."""
    found = []
    for text in overrides:
        if text.startswith(_SEARCH_PATH + "="):
            found += [Path(p) for p in re.findall(r"file://([^,\]\s'\"]+)", text)]
    for folder in found:
        if not folder.is_dir():
            raise UserError(f"{_SEARCH_PATH}: {folder} is no folder")
    return found


def _groups(folders: list[Path]) -> dict[str, list[str]]:
    """Choices of every group: `{"model": ["smollm2_135m", ...], ...}`."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/*.yaml")):
            found.setdefault(file.parent.name, []).append(file.stem)
    return found


def _prepare(overrides: list[str], groups: dict[str, list[str]]) -> tuple[list[str], dict[str, str]]:
    """Overrides for Hydra, and `{key: override as given}`. Raises for those that name nothing known."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    prepared, given, faults = [], {}, []
    for text in overrides:
        if text.startswith(_SEARCH_PATH + "="):
            prepared.append(text)
            continue
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            faults.append(f"override '{text}' cannot be read ({reason}); write key=value, and quote values with spaces")
            continue
        key = override.key_or_group
        if override.is_sweep_override():
            faults.append(f"override '{text}' is a sweep; give one value, or quote it: {key}='\"a,b\"'")
        elif override.is_delete():
            faults.append(f"override '{text}' deletes; a key cannot be deleted (set it to null, or to another value)")
        elif key in groups and "." not in key:
            choice = override.value()
            if choice is None:
                prepared.append(f"~{key}")
            elif choice not in groups[key]:
                faults.append(_no_choice(key, str(choice), groups[key]))
            else:
                prepared.append(f"{key}={choice}")
        elif not is_known(Config, key):
            near = suggestion(key, sorted(groups)) if "." not in key and nearest(Config, key) is None else ""
            problem = unknown_key(Config, key, f" in override '{text}'")
            faults.append(f"unknown key '{key}' in override '{text}'.{near}" if near else problem.text)
        else:
            given[key] = text
            prepared.append("++" + text.lstrip("+"))
    if faults:
        raise UserError(_listed("The command line", faults))
    return prepared, given


def _no_choice(group: str, choice: str, choices: list[str]) -> str:
    return f"{group}={choice}: no such {group}.{suggestion(choice, choices)} There are: {', '.join(choices)}"


def _compose(prepared: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hydra's composition as plain values over the schema's defaults, and the chosen file of each group."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = compose("config", prepared, return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        # Schema defaults lie underneath, so that ${...} may point at any key.
        merged = OmegaConf.merge(OmegaConf.create(asdict(Config())), composed)
        values = OmegaConf.to_container(merged, resolve=True)
        raw = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(f"The configuration cannot be composed: {_first_lines(error)}") from error
    assert isinstance(values, dict)
    assert isinstance(raw, dict)
    _mark_missing(raw, values)
    verifier = values["domain"]["verifier"]
    if isinstance(verifier, dict) and verifier["options"] is None:
        verifier["options"] = {}
    return {str(k): v for k, v in values.items()}, choices


def _mark_missing(raw: Mapping[Any, Any], values: dict[Any, Any]) -> None:
    """Put "???" back where a merge has let a default shine through: there the user must give a value."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _mark_missing(value, values[key])
        elif value == MISSING_VALUE:
            values[key] = value


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Config search path", "provider=", "See https"))]
    return "; ".join(kept)


def _chosen_files(folders: list[Path], choices: Mapping[str, Any]) -> list[Path]:
    """The YAML files that took part, later ones winning."""
    names = ["config.yaml", *(f"{g}/{c}.yaml" for g, c in choices.items() if isinstance(c, str))]
    return [folder / name for name in names for folder in folders if (folder / name).is_file()]


def _check_defaults(files: list[Path], groups: dict[str, list[str]]) -> None:
    """Refuse defaults entries that Hydra would silently skip: it takes any first word for `optional`."""
    faults = []
    for file in files:
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise UserError(f"{file} is no YAML: {_first_lines(error)}") from error
        for entry in content.get("defaults", []) if isinstance(content, dict) else []:
            if not isinstance(entry, dict):
                continue
            *words, group = str(next(iter(entry))).split()
            bad = [w for w in words if w not in ("optional", "override")]
            faults += [f"{file}: defaults: '{w}' is no keyword.{suggestion(w, ['optional', 'override'])}" for w in bad]
            name = group.lstrip("/").split("@")[0]
            if name not in groups and not name.startswith("hydra/"):
                faults.append(f"{file}: defaults: no group '{name}'.{suggestion(name, list(groups))}")
    if faults:
        raise UserError(_listed("The configuration", faults))


def _raise(problems: list[Problem], given: dict[str, str], files: list[Path]) -> None:
    """One error for the first kind of problem that there is, each with its place."""
    for kind in ("unknown", "type", "missing"):
        if texts := [p.text + _place(p.key, given, files) for p in problems if p.kind == kind]:
            raise UserError(_listed("The configuration", texts))


def _place(key: str, given: dict[str, str], files: list[Path]) -> str:
    for start, text in given.items():
        if key == start or key.startswith((start + ".", start + "[")):
            return f" (override '{text}')"
    for file in reversed(files):
        if line := _line_of(file, key):
            return f" ({file}:{line})"
    return ""


def _line_of(file: Path, key: str) -> int | None:
    """The line where a YAML file sets dotted `key` (a group's file sets keys under the group's name)."""
    text = file.read_text(encoding="utf-8")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    in_group = file.name != RESOLVED_NAME and not re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE)
    prefix = f"{file.parent.name}." if in_group else ""
    if not key.startswith(prefix):
        return None
    line = None
    for part in key.removeprefix(prefix).partition("[")[0].split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((k, v) for k, v in pairs if k.value == part), None)
        if found is None:
            return None
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _listed(subject: str, texts: list[str]) -> str:
    if len(texts) == 1:
        return f"{subject}: {texts[0]}"
    return f"{subject} has {len(texts)} errors:\n" + "\n".join(f"  - {text}" for text in texts)


def _absolute(cfg: Config) -> None:
    """Relative paths mean the directory the user stands in."""
    for key in _PATH_KEYS:
        *sections, leaf = key.split(".")
        owner: Any = cfg
        for section in sections:
            owner = getattr(owner, section)
        value = getattr(owner, leaf)
        if value is not None and not value.startswith("builtin:"):
            setattr(owner, leaf, os.path.abspath(os.path.expanduser(value)))


def save_resolved(cfg: Config, directory: Path) -> Path:
    """Write the whole resolved configuration to `directory`/config.yaml, atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RESOLVED_NAME
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(path)
    return path


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _under(key: str, roots: Iterable[str]) -> bool:
    return any(key == root or key.startswith(root + ".") for root in roots)


def subset(cfg: Config | Mapping[str, Any], stage: str | None = None) -> dict[str, Any]:
    """Flat `{key: value}` of what changes the result of `stage` (None: of any stage); benign keys are left out.

    To watch changes nothing, unless what is exported is chosen by it.
    """
    flat = flatten(cfg if isinstance(cfg, Mapping) else asdict(cfg))
    benign = BENIGN_KEYS if flat.get("watch.export_best") else (*BENIGN_KEYS, "watch")
    roots = STAGES[stage].config if stage else tuple(k.split(".")[0] for k in flat)
    return {k: v for k, v in flat.items() if _under(k, roots) and not _under(k, benign)}


def upgraded(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration `old` of another version of PivotRL as this version, whose `new` is, would have it.

    Keys that `old` lacks count where they are at their defaults in `new`.
    """
    defaults = flatten(asdict(Config()))
    added = {k: v for k, v in new.items() if k not in old and k in defaults and v == defaults[k]}
    return {**old, **added, **({"pivotrl": new["pivotrl"]} if "pivotrl" in new else {})}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines "key: old -> new" for flat mappings."""
    lines = []
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key, "(absent)"), new.get(key, "(absent)")
        if before != after:
            lines.append(f"{key}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: Any) -> str:
    return "null" if value is None else str(value)
