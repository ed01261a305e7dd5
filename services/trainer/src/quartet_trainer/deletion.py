"""All saved states of a run deleted at once, or those of one name.

1. The run's folder gets a name that no run has, and only when the disk has that are its files deleted: a kill
   at any moment leaves all states, or none that any call knows.
2. What was left of it the next deletion of that run deletes, or the trainer when it starts. Nobody waits for
   the latter.
3. Nothing of another run is touched, whatever the run is called; nor, where the caller says which run it
   means, the states of another one of its name (whose.py): then nothing is deleted. One that is harmed where
   it says whose it is keeps nobody from that: no run is opened from it.
4. Nothing is deleted through a link: what somebody put elsewhere is somebody's to remove.
5. Those of one name go as those do that a save makes room for (placing.py 3), which the disk has when it is
   answered. What was left of them the next save or deletion by a name deletes.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from quartet.errors import QuartetError

from quartet_trainer.disk import AWAY, flush, on_disk
from quartet_trainer.mark import read_mark
from quartet_trainer.placing import delete_left, discard, sweep
from quartet_trainer.spec import RunSpec
from quartet_trainer.states import StateInfo, StateStore
from quartet_trainer.whose import check_is_of, held_spec, meta_of

#: No run's folder begins with "@".
_DELETED = "@deleted-"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stock:
    """What is on the disk of a run."""

    states: int
    size_bytes: int


class Deletion:
    """Deletes below the folder of all states. Its methods are for threads that may wait for the disk."""

    def __init__(self, root: Path, states: StateStore) -> None:
        self._root, self._states = root.absolute(), states

    def stock(self, run_id: str, spec: RunSpec | None = None) -> Stock:
        """What deleting the run would free. Errors: RUN_CONFLICT and INVALID_CONFIG, of a spec; NOT_READY."""
        self._check_no_link(run_id)
        states = self._states.list(run_id)
        with on_disk(f"the states of run {run_id} cannot be counted", AWAY):
            if spec is not None:
                for info in states:
                    _check(run_id, info, spec)
            size = _bytes_below(self._root / run_id)
        return Stock(len(states), size)

    def _check_no_link(self, run_id: str) -> None:
        link = self._root / run_id
        if link.is_symlink():
            why = f"{link} is a link to {link.readlink()}; remove both by hand, and call again"
            raise QuartetError("NOT_READY", f"the states of run {run_id} cannot be deleted: {why}")

    def take_away(self, run_id: str, spec: RunSpec | None = None) -> Stock:
        """From here on no call knows a state of the run, which is not open. What there was. Errors: those of
        `stock`."""
        found = self.stock(run_id, spec)
        with on_disk(f"the states of run {run_id} cannot be deleted", AWAY):
            folder = self._root / run_id
            if folder.is_dir():
                folder.rename(self._root / f"{_left_of(run_id)}{time.time_ns()}")
                flush(self._root)
        log.info("states_deleted", run_id=run_id, states=found.states, size_bytes=found.size_bytes)
        return found

    def delete_named(self, run_id: str, name: str, spec: RunSpec | None = None) -> Stock:
        """Delete the states of a name, for the one thread that writes states: the run may be open. What there
        was. Errors: those of `stock`."""
        self._check_no_link(run_id)
        named = [info for info in self._states.list(run_id) if info.name == name]
        folder = self._root / run_id
        with on_disk(f"state {name} of run {run_id} cannot be deleted", AWAY):
            if folder.is_dir():
                sweep(folder)  # else a closed run would keep what a kill left
            if spec is not None:
                for info in named:
                    _check(run_id, info, spec)
            size = sum(_bytes_below(info.path) for info in named)
            for info in named:
                discard(info.path)
            if named:
                flush(folder)
        log.info("state_deleted", run_id=run_id, state=name, states=len(named), size_bytes=size)
        return Stock(len(named), size)

    def clear(self, run_id: str) -> None:
        """Delete what was taken away of a run. Errors: NOT_READY."""
        self._clear(_left_of(run_id))

    def clear_all(self) -> None:
        """Delete what a process before this one left of any run, as far as the disk lets it."""
        with suppress(QuartetError):  # which the log has
            self._clear(_DELETED)

    def _clear(self, prefix: str) -> None:
        with on_disk(f"the states in {self._root} cannot be read", AWAY):
            left = [path for path in self._root.iterdir() if path.name.startswith(prefix)]
        for path in left:
            delete_left(path)


def _check(run_id: str, info: StateInfo, spec: RunSpec) -> None:
    mark = read_mark(info.path)
    if mark is None:
        return
    try:
        meta = meta_of(info, mark)
    except FileNotFoundError:
        return
    except QuartetError as error:
        log.warning("state_harmed", run_id=run_id, state=info.name, error=str(error))
        return
    check_is_of(run_id, info, held_spec(info, meta), spec)


def _bytes_below(folder: Path) -> int:
    """Of all files but what goes meanwhile: an open run saves and prunes. Raises OSError."""

    def unlisted(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    size = 0
    for inner, _, names in os.walk(folder, onerror=unlisted):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(inner, name).lstat().st_size
    return size


def _left_of(run_id: str) -> str:
    return f"{_DELETED}{run_id}@"
