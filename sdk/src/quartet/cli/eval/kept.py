"""What lies beside the services of an evaluation, under its name:
OUTPUT/evals/services/RUN_ID/ENVIRONMENT--MODEL/.

1. The name of a new one is its time. Of several that begin in one second each has its own: whoever makes the
   folder has the name, the next one a number behind it.
2. `asked.json` is what was asked for, flags included, as an evaluation's file says it: `--resume` goes on
   from it without being told all of it again. JSON, for an argument of an environment may be null, which TOML
   has not. It may hold a judge's key: for its owner alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.outputs import PRIVATE, write_json
from quartet.config import ConfigError
from quartet.config.text import read_text
from quartet.run.name import RULE, is_run_id

#: Where the services of an evaluation keep their configs and logs, beside its results.
SERVICES: Final = "services"
ASKED: Final = "asked.json"
#: A script that starts more of the same in one second has to name them.
MAX_OF_A_SECOND: Final = 100


def new_run_id(base: Path, folder: str = "") -> str:
    """A name that nobody has; `folder` of its services is made. Raises ConfigError."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, MAX_OF_A_SECOND + 1):
        run_id = now if number == 1 else f"{now}-{number}"
        try:
            (base / SERVICES / run_id / folder).mkdir(parents=True)
        except FileExistsError:
            continue
        return run_id
    raise ConfigError(
        f"{base / SERVICES / now} is the first of {MAX_OF_A_SECOND} of one second; wait for the next"
    )


def keep(services: Path, config: EvalFileConfig) -> None:
    """Write down what is asked for. Raises OSError."""
    write_json(services / ASKED, config.model_dump(mode="json", exclude_unset=True), PRIVATE)


def asked_before(base: Path, run_id: str) -> Path:
    """Where it stands what an evaluation was asked for; the last one, where none is named. Raises
    ConfigError."""
    if run_id and not is_run_id(run_id):
        raise ConfigError(f"--resume {run_id!r} is refused: {RULE}")
    files = list((base / SERVICES).glob(f"{run_id or '*'}/*/{ASKED}"))
    if not files:
        raise ConfigError(
            f"--resume: {base} has no evaluation{f' {run_id}' if run_id else ''} that goes on without being "
            "told its environment and model; name them as they were, or the --output-dir that it is in"
        )
    if run_id and len(files) > 1:
        names = ", ".join(sorted(file.parent.name for file in files))
        raise ConfigError(f"--resume: {run_id} is the name of {names}; name the environment and model of one")
    return max(files, key=lambda file: file.stat().st_mtime)


def asked_in(file: Path) -> dict[str, Any]:
    """What stands there. Raises ConfigError."""
    text = read_text(file, f"--resume: {file}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--resume: {file} cannot be read ({error}); name the environment and model as they were"
        ) from error
