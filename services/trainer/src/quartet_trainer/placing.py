"""How the folder of a state comes to its place, takes another's, and goes: by renames that the disk has.

1. A folder is written under a name that no state has, and renamed once it is whole.
2. Where another folder has the place, the new one stands beside it before that goes: at every moment one of
   them is there.
3. What goes is out of the list first, then deleted. What a kill or the disk left of it, `sweep` deletes.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import structlog

from quartet_trainer.disk import flush

#: No state's folder begins with "@", because no name is empty.
_TEMPORARY = "@writing-"
_DISCARDED = "@discarded-"
#: Ends the name of one that stands beside the older state whose place it takes.
_TAKES_PLACE = "@again"

log = structlog.get_logger()


def writing_place(target: Path) -> Path:
    """Where the folder that is to be `target` is written."""
    return target.with_name(_TEMPORARY + target.name)


def is_place(path: Path) -> bool:
    """Whether a folder has the name of a state, and not of what is written or goes."""
    return not path.name.startswith("@")


def put(writing: Path, target: Path) -> None:
    """Bring a whole folder, flushed, to its place. Errors: OSError."""
    if target.exists():
        # Written before under this seq_id, by a process that died before it could say so, or on a way since
        # abandoned. A kill leaves one of them, or both.
        beside = target.with_name(target.name + _TAKES_PLACE)
        if beside.exists():
            discard(beside)
        writing.rename(beside)
        flush(target.parent)
        target.rename(_discarded(target))
        writing = beside
    writing.rename(target)
    flush(target.parent)
    sweep(target.parent)


def discard(state: Path) -> None:
    """Remove a state. Errors: OSError, where it is still in its place."""
    # A kill between the two leaves no half state under a state's name.
    discarded = _discarded(state)
    state.rename(discarded)
    delete_left(discarded)


def sweep(folder: Path) -> None:
    """Remove what was left behind among the states of a run."""
    for path in folder.iterdir():
        if path.name.startswith((_TEMPORARY, _DISCARDED)):
            delete_left(path)


def delete_left(left: Path) -> None:
    """Remove a folder that no name of a run or a state leads to, as far as the disk lets it."""
    try:
        shutil.rmtree(left)
    except OSError as error:  # as where another machine reads it over NFS
        log.warning("not_deleted", path=error.filename or str(left), why=error.strerror or str(error))


def _discarded(state: Path) -> Path:
    # One of this name may be left, where the disk did not let it go.
    return state.with_name(f"{_DISCARDED}{state.name}@{time.time_ns()}")
