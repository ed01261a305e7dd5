"""The run of a command line: `@ run.toml --key value`, in Quartet's dialect or in that of `vf-rl`.

1. A file is taken for one of vf-rl by its form (`is_vf_rl`), which is said on stderr, with what has no
   effect here. Its own keys may be options, too (`--trainer.args.max_steps 3`, `--micro_batch_size 2`).
2. What is said in Quartet's keys is laid over what the files of vf-rl become, wherever it stands.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from quartet.cli.carried import refused_by_services
from quartet.config import Config, ConfigError, load
from quartet.config.keys import annotation_at, is_table
from quartet.config.load import Draft, merged, read_toml
from quartet.run.config import RunConfig
from quartet.run.values import Table
from quartet.run.vf_rl import Engine, Untranslated, is_vf_rl, owns, translate


@dataclass(frozen=True)
class RunFile:
    """A run, and what else its file says."""

    config: RunConfig
    #: The arguments that are of Quartet's own dialect.
    options: list[str]
    #: A name for the folder, where the file gives one; or the folder itself.
    name: str | None = None
    output_dir: Path | None = None


class _VfRlTables(Config):
    """What options of vf-rl may name."""

    env: Table
    inference: Table
    trainer: Table


def load_run(argv: list[str], *, starts_services: bool = True, flags: Collection[str] = ()) -> RunFile:
    """Parse and validate. `flags` are the command's options that are no keys. `starts_services`: here, so
    that they look at their tables of a run that is refused. Raises ConfigError.
    """
    # Once each: what a shell's <(...) names can be read no second time.
    once = cache(read_toml)

    def read(path: str) -> dict[str, Any]:
        return deepcopy(once(path))  # a file may stand for two tables, which go their own ways

    begun = partial(Draft, read=read, flags=flags)
    if starts_services:
        begun = partial(begun, of_carried=refused_by_services)
    files = [path for path in _files(argv) if _is_vf_rl(path, read)]
    if not files:
        return RunFile(load(RunConfig, argv, begun()).config, argv)
    theirs, ours = _parted(argv, files)
    said = merged(_VfRlTables, theirs, Draft(read=read))
    if starts_services:
        engine = _engine(said.values, merged(RunConfig, ours, Draft(read=read)).values)
    else:
        engine = "vllm"  # nobody here knows what there is elsewhere, and nothing of it is read
    refused = said.refused
    try:
        run = translate(said.values, engine, wandb_project=_wandb_project())
    except Untranslated as error:
        run, refused = error.run, [*refused, error]
    origins = {**said.origins, **{path: _place(source, said) for path, source in run.origins.items()}}
    draft = begun(run.tables, origins, refused=refused, lacks_a_file=bool(refused))
    config = load(RunConfig, ours, draft).config
    print(f"{', '.join(files)}: read as vf-rl; --dry-run shows the run that it is here", file=sys.stderr)
    if run.without_effect:
        print(f"without effect here: {'; '.join(run.without_effect)}", file=sys.stderr)
    return RunFile(config, ours, run.run_name, Path(run.output_dir) if run.output_dir else None)


def _is_vf_rl(path: str, read: Callable[[str], dict[str, Any]]) -> bool:
    """Not where the file cannot be read, which `load` refuses with all the rest."""
    try:
        return is_vf_rl(read(path))
    except ConfigError:
        return False


def _files(argv: list[str]) -> Iterator[str]:
    """The paths after '@', but for those after the name of a table, which are of Quartet's dialect."""
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if _names_table(token) and rest and rest[0].startswith("@"):
            _path(rest)
        elif token.startswith("@") and (path := _path([token, *rest[:1]])):
            yield path


def _path(rest: list[str]) -> str:
    """Take '@' and its path from the front."""
    return rest.pop(0)[1:] or (rest.pop(0) if rest else "")


def _names_table(token: str) -> bool:
    key = tuple(token.removeprefix("--").replace("-", "_").split("."))
    return token.startswith("--") and is_table(annotation_at(RunConfig, key))


def _parted(argv: list[str], files: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of vf-rl, and those of Quartet."""
    theirs: list[str] = []
    ours: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if _names_table(token) and rest and rest[0].startswith("@"):
            ours += [token, "@", _path(rest)]
            continue
        if token.startswith("@"):
            rest.insert(0, token)
            path = _path(rest)
            (theirs if path in files else ours).extend(["@", path] if path else ["@"])
            continue
        name, equals, value = token.removeprefix("--").partition("=")
        place = owns(tuple(name.replace("-", "_").split("."))) if token.startswith("--") else None
        has_value = bool(equals or (rest and not rest[0].startswith(("--", "@"))))
        if place is None or not has_value:  # refused as it was written
            ours.append(token)
            continue
        theirs.append(f"--{'.'.join(place)}{equals}{value}")
        if not equals:
            theirs.append(rest.pop(0))
    return theirs, ours


def _engine(*said: dict[str, Any]) -> Engine:
    """vLLM, which is vf-rl's, where it is installed; a word about it in Quartet's keys wins."""
    services = [one for tables in said if isinstance(one := tables.get("inference"), dict)]
    named: list[Engine] = [one["engine"] for one in services if one.get("engine") in ("embedded", "vllm")]
    installed: Engine = "embedded" if importlib.util.find_spec("vllm") is None else "vllm"
    return named[-1] if named else installed


def _wandb_project() -> str | None:
    """That of transformers, whose trainer vf-rl's is; None where a run has no such table."""
    if "wandb" not in RunConfig.model_fields:
        return None
    return os.environ.get("WANDB_PROJECT") or "huggingface"


def _place(source: str, said: Draft) -> str:
    """Where a key stands, as refusals name it."""
    origin = said.origins.get(tuple(source.split(".")))
    if origin is None or origin.startswith("--"):
        return origin or source
    return f"{source} of {origin}"
