"""What an evaluation, or an optimisation of a prompt (quartet.cli.gepa), was asked for, kept beside it.

1. The name of a new evaluation is its time. Of several that begin in one second each has its own: whoever
   makes the folder has the name, the next one a number behind it.
2. `asked.json` is what was asked for, flags included, as the command's file says it: `--resume` goes on from
   it without being told all of it again. JSON, for an argument of an environment may be null, which TOML has
   not. It may hold a judge's key: for its owner alone.
3. Where none is named, the last one is gone on with, and said. One that was refused before it began is not
   taken so: by its name it is, once what was wrong is mended.
4. What was said over it when it was gone on with, and kept it from beginning, is not kept (`put_back`).
5. What may not change meanwhile is refused with its key, as the command is told it (`check_same`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from quartet.cli.eval.arguments import OUTPUT_DIR, one_run_id
from quartet.cli.eval.source import answered_by
from quartet.cli.outputs import PRIVATE, write_json, write_text
from quartet.config import Config, ConfigError, load
from quartet.config.load import Draft
from quartet.config.text import read_text
from quartet.run.name import RULE, is_run_id

C = TypeVar("C", bound=Config)

#: Where the services of an evaluation keep their configs and logs, beside its results.
SERVICES: Final = "services"
ASKED: Final = "asked.json"
#: Beside it: nothing was begun.
REFUSED: Final = "refused"
#: A script that starts more of the same in one second has to name them.
MAX_OF_A_SECOND: Final = 100


@dataclass(frozen=True)
class Shelf:
    """Where those of a command lie: the folder of one, below that of all."""

    command: str
    #: What one of them is.
    thing: str
    #: By its name and by what it is of, which a folder of results is called after.
    folder: str

    def files(self, base: Path, run_id: str) -> list[Path]:
        """What is kept of those of a name; of all, where that is empty."""
        return list(base.glob(f"{self.folder.format(run_id=run_id or '*', of='*')}/{ASKED}"))

    def names(self, file: Path) -> dict[str, str]:
        """Those in the folder of a file, as `folder` calls them."""
        called = zip(reversed(self.folder.split("/")), file.parents, strict=False)
        return {field[1:-1]: one.name for field, one in called if field.startswith("{")}

    def again(self, run_id: str, output_dir: Path) -> str:
        """The command that goes on with one."""
        where = [] if output_dir == Path(OUTPUT_DIR) else ["-o", str(output_dir)]
        return shlex.join(["quartet", self.command, "--resume", run_id, *where])


EVALUATIONS: Final = Shelf("eval", "evaluation", f"{SERVICES}/{{run_id}}/{{of}}")
OPTIMISATIONS: Final = Shelf("gepa", "optimisation", "{of}/{run_id}")


def new_run_id(base: Path) -> str:
    """A name that nobody has; the folder of its services is made. Raises ConfigError."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, MAX_OF_A_SECOND + 1):
        run_id = now if number == 1 else f"{now}-{number}"
        try:
            (base / SERVICES / run_id).mkdir(parents=True)
        except FileExistsError:
            continue
        return run_id
    raise ConfigError(
        f"{base / SERVICES / now} is the first of {MAX_OF_A_SECOND} of one second; wait for the next"
    )


def keep(folder: Path, config: Config) -> str | None:
    """Write down what is asked for. What was, if anything: for `put_back`. Raises OSError."""
    file, before = folder / ASKED, None
    if file.exists():
        before = file.read_text(encoding="utf-8", errors="replace")
    write_json(file, config.model_dump(mode="json", exclude_unset=True), PRIVATE)
    (folder / REFUSED).unlink(missing_ok=True)
    return before


def put_back(folder: Path, before: str | None) -> None:
    """What was asked for before stands again, as far as the disk takes it."""
    if before is not None:
        with contextlib.suppress(OSError):
            write_text(folder / ASKED, before, PRIVATE)


def refused(folder: Path) -> None:
    """Note that it was, before anything of it began. Where the disk takes no note the refusal is still what
    is told."""
    with contextlib.suppress(OSError):
        (folder / REFUSED).touch()


def check_same(
    keys: Mapping[str, str], before: Mapping[str, Any], now: Mapping[str, Any], folder: Path
) -> None:
    """Whether a folder was begun with equal settings; `keys` has those that count, with what the command
    calls each. Raises ConfigError."""
    for name, key in keys.items():
        if before.get(name) != now[name]:
            said, was = (_said(name, key, settings.get(name)) for settings in (now, before))
            raise ConfigError(
                f"{said} is refused: {folder} was begun with {was}; set that, or begin anew without --resume"
            )


def _said(name: str, key: str, value: Any) -> str:
    if name == "base_url" and value:
        key, value = answered_by(value)
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def asked_again(model: type[C], shelf: Shelf, base: Path, options: argparse.Namespace, keys: list[str]) -> C:
    """What was asked for by --resume alone, with what `keys` say now over it; its name is in `options` then.
    Raises ConfigError."""
    one_run_id(options)
    file = _asked_before(shelf, base, options.resume or options.run_id or "")
    options.resume, asked = shelf.names(file)["run_id"], _asked_in(file)
    draft = Draft(asked, {(key,): str(file) for key in asked}, flags=options.flags)
    return load(model, keys, draft).config


def latest(folders: Sequence[Path], begun: str) -> str:
    """The name of the one that was begun last in any of the folders, by the file that each has then; it is
    said. Raises ConfigError."""
    files = [file for folder in folders for file in folder.glob(f"*/{begun}")]
    if not files:
        raise ConfigError(f"--resume: there is nothing to go on with in {folders[0]}")
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    _say(newest.name, newest.parent.name)
    return newest.name


def _asked_before(shelf: Shelf, base: Path, run_id: str) -> Path:
    """Where it stands; of the last one, which is said, where none is named. Raises ConfigError."""
    if run_id and not is_run_id(run_id):
        raise ConfigError(f"--resume {run_id!r} is refused: {RULE}")
    files = shelf.files(base, run_id)
    if not run_id:
        files = [file for file in files if not file.with_name(REFUSED).exists()]
    if not files:
        raise ConfigError(
            f"--resume: {base} has no {shelf.thing}{f' {run_id}' if run_id else ''} that goes on without "
            "being told its environment and model; name them as they were, or the --output-dir that it is in"
        )
    if run_id and len(files) > 1:
        names = ", ".join(sorted(shelf.names(file)["of"] for file in files))
        raise ConfigError(f"--resume: {run_id} is the name of {names}; name the environment and model of one")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    if not run_id:
        _say(**shelf.names(newest))
    return newest


def _say(run_id: str, of: str) -> None:
    print(f"--resume: the last one is {run_id} of {of}", file=sys.stderr)


def _asked_in(file: Path) -> dict[str, Any]:
    """What stands there. Raises ConfigError."""
    text = read_text(file, f"--resume: {file}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--resume: {file} cannot be read ({error}); name the environment and model as they were"
        ) from error
