"""All saved states of a run deleted at once.

1. The run's folder gets a name that no run has, and only when the disk has that are its files deleted: a kill
   at any moment leaves all states, or none that any call knows.
2. What was left of it the next deletion of that run deletes, or the trainer when it starts. Nobody waits for
   the latter.
3. Nothing of another run is touched, whatever the run is called.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from quartet.errors import QuartetError

from quartet_trainer.disk import flush
from quartet_trainer.states import AWAY, StateStore, delete_left, on_disk

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

    def stock(self, run_id: str) -> Stock:
        """What deleting the run would free. Errors: NOT_READY."""
        with on_disk(f"the states of run {run_id} cannot be counted", AWAY):
            files = [*(self._root / run_id).rglob("*")]
            size = sum(file.lstat().st_size for file in files if file.is_file())
        return Stock(len(self._states.list(run_id)), size)

    def take_away(self, run_id: str) -> Stock:
        """From here on no call knows a state of the run, which is not open. What there was. Errors:
        NOT_READY."""
        found = self.stock(run_id)
        with on_disk(f"the states of run {run_id} cannot be deleted", AWAY):
            folder = self._root / run_id
            if folder.is_dir():
                folder.rename(self._root / f"{_left_of(run_id)}{time.time_ns()}")
                flush(self._root)
        log.info("states_deleted", run_id=run_id, states=found.states, size_bytes=found.size_bytes)
        return found

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


def _left_of(run_id: str) -> str:
    return f"{_DELETED}{run_id}@"
