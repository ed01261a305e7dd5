"""Where a script serves its prompts and rewards: a socket in a folder of its own.

1. A run that goes on is served where it began: the address is a part of what it is, and its own record has
   it, wherever its output folder is now, and whatever TMPDIR is, which a job of a cluster has anew each time.
2. It is short, because a socket's path has to be.
3. The folder is there as long as somebody serves in it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path

from quartet.config.model import ConfigError
from quartet.rewards.listening import SCHEME, held
from quartet.trl.translate import ENVIRONMENT

#: Every Unix has it, under that short name, whatever machine or job the run goes on with: 1, 2.
EVERYWHERE = "/tmp"
#: Of its folder, which is random behind that.
NAMED = "quartet-rewards-"


def fresh() -> str:
    """One that nobody else has."""
    folder = EVERYWHERE if os.access(EVERYWHERE, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return f"{SCHEME}{folder}/{NAMED}{secrets.token_hex(8)}/socket"


def of_run(folder: Path) -> str | None:
    """That of the run in an output folder; None where there is none of a script's rewards."""
    from quartet.cli.job import RECORD

    try:
        run = tomllib.loads(json.loads((folder / RECORD).read_text(encoding="utf-8"))["config_toml"])
        env = run["env"][0]
        at = str(env["args"]["address"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return at if env["id"] == ENVIRONMENT and _folder(at).name.startswith(NAMED) else None


def remove(at: str) -> None:
    """Its folder, where nobody serves in it."""
    with suppress(ConfigError), held(at):
        shutil.rmtree(_folder(at), ignore_errors=True)


def _folder(at: str) -> Path:
    return Path(at.removeprefix(SCHEME)).parent
