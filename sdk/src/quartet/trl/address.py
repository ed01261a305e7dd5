"""Where a script serves its prompts and rewards: a socket in a folder of its own.

1. A run that goes on is served where it began: the address is a part of what it is, and its own record has
   it, wherever its output folder is now.
2. No address is longer than a socket's path may be.
3. The folder is there as long as somebody serves in it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path

from quartet.config.model import ConfigError
from quartet.rewards.listening import SCHEME, held
from quartet.trl.translate import ENVIRONMENT

#: So that any system takes it: macOS has less room than Linux (listening.py).
ROOM_BYTES = 100
#: Where the folder for temporary files has a long name; every Unix has it.
SHORT = "/tmp"
#: Of its folder, which is random behind that.
NAMED = "quartet-rewards-"


def fresh() -> str:
    """One that nobody else has."""
    name = f"{NAMED}{secrets.token_hex(8)}/socket"
    path = f"{tempfile.gettempdir()}/{name}"
    return SCHEME + (path if len(path.encode()) <= ROOM_BYTES else f"{SHORT}/{name}")


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
