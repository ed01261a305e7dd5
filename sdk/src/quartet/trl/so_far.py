"""Where a run stands, as its reward functions are told of it while it is trained.

1. Only what is new is read, by one of those who ask at a time: groups are scored side by side, as often as a
   run has steps, and a long run has many.
2. What was told stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.points import Lines
from quartet.scripts import outcome
from quartet.scripts.loop import Moment
from quartet.scripts.outcome import Row


@dataclass(frozen=True)
class TrainerState(outcome.TrainerState):
    """Where it stands, in optimizer steps and in passes over the prompts."""

    epoch: float


class SoFar:
    """Of one run."""

    def __init__(
        self, file: Path, moment_of: Callable[[Row], Moment], max_steps: int, steps_of_epoch: int
    ) -> None:
        """`file` is its metrics.jsonl, of which nothing is read yet."""
        self._lines, self._moment_of, self._steps_of_epoch = Lines(file), moment_of, steps_of_epoch
        self._state = TrainerState(0, max_steps, [], 0.0)
        self._lock = threading.Lock()

    def state(self) -> TrainerState:
        """As it stands now. From any thread."""
        with self._lock:
            if moments := list(map(self._moment_of, self._lines.new())):
                before = self._state
                step = max([before.global_step, *(one.step for one in moments if not one.is_evaluation)])
                history = [*before.log_history, *(one.row for one in moments if one.row is not None)]
                self._state = TrainerState(step, before.max_steps, history, step / self._steps_of_epoch)
            return self._state
