"""The run of a command line: `@ run.toml --key value`, in Quartet's dialect or in that of another trainer.

1. A file of vf-rl or prime-rl is known by its form (dialects.py), which is said on stderr, with what has no
   effect here, also where the run is refused. Its own keys may be options, too (`--trainer.args.max_steps 3`,
   `--trainer.optim.lr 1e-5`).
2. What is said in Quartet's keys is laid over what such files become, wherever it stands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quartet.cli.carried import refused_by_services
from quartet.cli.dialects import Asked, Dialect, dialect_of, items, mixed, parted
from quartet.cli.their_engine import engine_of, has_two_gpus
from quartet.config import load
from quartet.config.load import Draft, merged
from quartet.config.once import reads_once
from quartet.local.toml_text import dumps
from quartet.run.config import RunConfig
from quartet.run.dialect import Untranslated


@dataclass(frozen=True)
class RunFile:
    """A run, and what else its file says."""

    config: RunConfig
    #: The arguments that are of Quartet's own dialect.
    options: list[str]
    #: A name for the folder, where the file gives one; or the folder itself.
    name: str | None = None
    output_dir: Path | None = None
    #: The trainer whose file it is; empty where it is Quartet's own.
    dialect: str = ""

    @property
    def toml(self) -> str:
        """The run as a file of one's own: what was said, and nothing that is a default here."""
        return dumps(self.config.model_dump(mode="json", exclude_unset=True, exclude_none=True))


def load_run(argv: list[str], *, starts_services: bool = True, flags: Collection[str] = ()) -> RunFile:
    """Parse and validate. `flags` are the command's options that are no keys. `starts_services`: here, so
    that they look at their tables of a run that is refused. Raises ConfigError.
    """
    read = reads_once()
    begun = partial(Draft, read=read, flags=flags)
    if starts_services:
        begun = partial(begun, of_carried=refused_by_services)
    arguments = list(items(argv))
    if unread := mixed(arguments, read):
        arguments = [one for one in arguments if one not in [item for item, _ in unread]]
        argv = [token for one in arguments for token in one.tokens]
    refused = [error for _, error in unread]
    dialect, files = dialect_of(arguments, read)
    if dialect is None:
        draft = begun(refused=refused, lacks_a_file=bool(refused))
        return RunFile(load(RunConfig, argv, draft).config, argv)
    theirs, ours, laid_over = parted(arguments, dialect, files)
    said = merged(dialect.options, theirs, Draft(read=read))
    own = merged(RunConfig, laid_over, Draft(read=read)).values
    refused += said.refused
    _tell(dialect, [one.file for one in files], said)
    engine = engine_of(said.values, own, starts_services=starts_services)
    if starts_services:
        engine.tell()
    try:
        ours_said = {key.replace("-", "_"): value for key, value in own.items()}
        two_gpus = has_two_gpus(said.values, own)
        asked = Asked(starts_services, engine.name, _wandb_project(), ours_said, two_gpus)
        run = dialect.translate(said.values, asked)
    except Untranslated as error:
        run, refused = error.run, [*refused, error]
    if engine.python is not None:
        run.tables.setdefault("inference", {})["python"] = engine.python
    origins = {**said.origins, **{path: place_of(source, said) for path, source in run.origins.items()}}
    if run.without_effect:
        print(f"without effect here: {'; '.join(run.without_effect)}", file=sys.stderr)
    draft = begun(run.tables, origins, translated=dict(origins), refused=refused, lacks_a_file=bool(refused))
    config = load(RunConfig, laid_over, draft).config
    output_dir = Path(run.output_dir) if run.output_dir else None
    return RunFile(config, ours, run.run_name, output_dir, dialect.name)


def _tell(dialect: Dialect, files: list[str], said: Draft) -> None:
    read_as = f"{', '.join(files)}: read as {dialect.name}{dialect.remark(said.values)}"
    print(f"{read_as}; 'quartet rl --dry-run' shows the run that it is", file=sys.stderr)


def _wandb_project() -> str | None:
    """That of transformers, whose trainer vf-rl's is; None where a run has no such table."""
    if "wandb" not in RunConfig.model_fields:
        return None
    return os.environ.get("WANDB_PROJECT") or "huggingface"


def place_of(source: str, said: Draft) -> str:
    """Where a key stands, as refusals name it."""
    path = tuple(source.split("."))
    # Keys inside a list have no places of their own.
    origin = next(
        (said.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in said.origins), None
    )
    if origin is None or origin.startswith("--"):
        return origin or source
    return f"{source} of {origin}"
