"""The runs that versions are held of: which there are, in which order, and which of them makes room.

1. Never more than MAX_RUNS. Where `unopened_runs` is given, of runs that nobody opened the one longest
   without a version makes room, and one that gets a version counts as opened then; of runs of adapters,
   `unopened_adapters` are held beside them where that is given.
2. A run that is closed, or begins anew, is another generation from then on: what is known of its versions,
   and the deltas between them, is forgotten.
3. Not thread-safe: whoever owns it holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from quartet.errors import QuartetError
from quartet.weights.versions import Run

#: Runs one process can publish for at once; each pins `keep` copies of a model.
MAX_RUNS = 64


class Runs:
    """Runs by their names."""

    def __init__(
        self, unopened_runs: int | None, unopened_adapters: int, forget_deltas: Callable[[Run], None]
    ) -> None:
        """`forget_deltas` is told of a generation whose versions are forgotten."""
        # By whether their versions are adapters.
        self._unopened = {False: unopened_runs, True: unopened_adapters or unopened_runs}
        self._forget_deltas = forget_deltas
        # In the order of their creation or opening; where some come unopened, these by their last version.
        self._runs: dict[str, Run] = {}
        self._generations = count(1)
        self._takes = count(1)

    def get(self, run_id: str) -> Run | None:
        """A run, where there is one of that name."""
        return self._runs.get(run_id)

    def find(self, run_id: str) -> Run | None:
        """A run; of "" the one that was opened last, None before the first. Errors: RUN_UNKNOWN."""
        if not run_id:
            return next(reversed(self._runs.values()), None)
        if run_id not in self._runs:
            raise QuartetError("RUN_UNKNOWN", f"run {run_id} is not published here", run_id=run_id)
        return self._runs[run_id]

    def by_arrival(self) -> list[Run]:
        """All of them, the one that got a version last at the end."""
        return sorted(self._runs.values(), key=lambda run: run.taken)

    def open(self, run_id: str) -> None:
        """Make a run known, or the one that was opened last. Errors: INVALID_REQUEST, OVERLOADED."""
        if run_id in self._runs:
            self._runs[run_id] = self._runs.pop(run_id)
            self._runs[run_id].opened = True
        else:
            self.create(run_id, opened=True)

    def create(self, run_id: str, *, opened: bool = False, adapters: bool = False) -> Run:
        """A run without versions. Errors: INVALID_REQUEST, OVERLOADED."""
        if not run_id:
            raise QuartetError("INVALID_REQUEST", "a run needs a name", field="run_id", value="")
        if not opened:
            self._make_room(adapters)
        if len(self._runs) >= MAX_RUNS:
            raise QuartetError("OVERLOADED", f"{MAX_RUNS} runs are published already; close one first")
        run = self._runs[run_id] = Run(next(self._generations), opened=opened, adapters=adapters)
        return run

    def renew(self, run_id: str, *, opened: bool, adapters: bool = False) -> Run:
        """Forget a run's versions. In its place: it does not become the run that was opened last."""
        self._forget_deltas(self._runs[run_id])
        run = self._runs[run_id] = Run(next(self._generations), opened=opened, adapters=adapters)
        return run

    def close(self, run_id: str) -> None:
        """Forget a run, if there is one of that name."""
        if run_id in self._runs:
            self._forget_deltas(self._runs.pop(run_id))

    def close_others(self, run_id: str) -> None:
        """Forget every other run."""
        for other in [one for one in self._runs if one != run_id]:
            self.close(other)

    def took(self, run_id: str) -> None:
        """A run got a version."""
        run = self._runs[run_id]
        run.taken = next(self._takes)
        if self._unopened[run.adapters] is not None and not run.opened:
            self._runs[run_id] = self._runs.pop(run_id)  # it came last

    def _make_room(self, adapters: bool) -> None:
        bound = self._unopened[adapters]
        if bound is None:
            return
        unopened = [one for one, run in self._runs.items() if not run.opened and run.adapters == adapters]
        if len(unopened) >= bound:
            self.close(min(unopened, key=lambda one: self._runs[one].taken))
