"""What a folder held before --overwrite gave it to another run: kept until that run is accepted.

1. `set_aside` makes room for the run, `put_back` undoes it where the run was refused or did not begin,
   `forget` deletes what was kept once the run is accepted.
2. A kill at any moment loses nothing of it: an attempt that was killed before its run was accepted leaves it
   aside, and the next one, whoever begins it, keeps it or puts it back.
3. What an attempt that did not begin logged stays as FAILED_LOGS, until the next begins.
4. A run that begins with what is in the folder is refused: it would be gone.

Everything happens inside the folder, which is held, by renames.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from quartet.cli.held import LOCK, empty
from quartet.config import ConfigError
from quartet.run.config import RunConfig

LOGS: Final = "logs"
FAILED_LOGS: Final = "logs-of-failed-start"
#: What was there.
ASIDE: Final = ".overwritten"
#: The same while it is moved there or back: whatever stands beside it is part of it.
_MOVING: Final = ".overwritten-moving"
#: The same while it is deleted.
_GONE: Final = ".overwritten-gone"


def check_not_needed(config: RunConfig, folder: Path, elsewhere: str) -> None:
    """Whether a new run may have the folder emptied, as far as what it begins with is concerned. Raises
    ConfigError."""
    reference = config.algorithm.reference
    begins_with = {
        "model": config.model,
        "initial_state": config.initial_state,
        "lora.initial_adapter": config.lora.initial_adapter,
        "algorithm.reference.model": None if reference is None else reference.model,
    }
    for key, named in begins_with.items():
        if named is not None and _is_in(Path(os.path.expanduser(named)), folder):
            raise ConfigError(
                f"{key} = {named!r} is in the output folder, and what that holds is deleted for a new run; "
                f"name {elsewhere}"
            )


def _is_in(named: Path, folder: Path) -> bool:
    """By its name or by what that leads to: a link in the folder would be gone, too."""
    lexically = named.absolute().is_relative_to(folder.absolute())
    return lexically or named.resolve().is_relative_to(folder.resolve())


def set_aside(folder: Path) -> None:
    """Leave the folder, which is mended, empty, but for its lock and what it held."""
    aside = folder / ASIDE
    if aside.exists():  # the attempt after it was killed, and came to nothing
        empty(folder, ASIDE)
        return
    _remove(folder / FAILED_LOGS)
    entries = [entry for entry in folder.iterdir() if entry.name != LOCK]
    if not entries:
        return
    moving = folder / _MOVING
    moving.mkdir()
    for entry in entries:
        entry.rename(moving / entry.name)
    moving.rename(aside)


def put_back(folder: Path) -> bool:
    """Let the folder hold what was set aside, and the logs of the attempt. Whether anything was."""
    aside = folder / ASIDE
    if not aside.exists():
        return False
    if (logs := folder / LOGS).exists():
        _remove(folder / FAILED_LOGS)
        logs.rename(folder / FAILED_LOGS)
    empty(folder, ASIDE, FAILED_LOGS)
    aside.rename(folder / _MOVING)
    mend(folder)
    return True


def forget(folder: Path) -> None:
    """Delete what was set aside, and the logs of an attempt before."""
    if (aside := folder / ASIDE).exists():
        _remove(folder / _GONE)
        # Under another name first: half of it is nothing to put back.
        aside.rename(folder / _GONE)
    _remove(folder / _GONE)
    _remove(folder / FAILED_LOGS)


def is_kept(folder: Path, name: str) -> bool:
    """Whether what was set aside has a file of this name, also where a kill cut that short."""
    return any((folder / kept / name).exists() for kept in (ASIDE, _MOVING))


def mend(folder: Path) -> None:
    """End what a kill cut short: what was on its way is moved back, what was being deleted is."""
    _remove(folder / _GONE)
    moving = folder / _MOVING
    if not moving.exists():
        return
    for entry in list(moving.iterdir()):
        entry.rename(folder / entry.name)
    moving.rmdir()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
