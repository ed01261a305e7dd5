"""What a run under way does or waits for: one of a closed set, which is a label of metrics, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

#: By name, of runs that another one waits for: a line has room for no more.
MAX_NAMED: Final = 3


class Activity(Enum):
    """With the words for a person, and the place of the step in them."""

    TURN = "waiting for its turn"
    OPENING = "opening the run on the trainer"
    VERSION = "waiting until inference serves its version"
    ROLLOUTS = "waiting for the rollouts of step {}"
    HELD = "waiting for evaluations that were asked for"
    TRAINING = "training step {}"
    SAVING = "saving the state after step {}"
    EVALUATING = "evaluating after {} steps"
    EXPORTING = "exporting the model"
    CLOSING = "waiting for the trainer to close the run"

    def words(self, step: int) -> str:
        """For a person."""
        return self.value.format(step)


def named(runs: Sequence[str]) -> str:
    """Runs that another one waits for, in words."""
    names = ", ".join(map(repr, runs[:MAX_NAMED]))
    more = f" and {len(runs) - MAX_NAMED} more" if len(runs) > MAX_NAMED else ""
    return f"run{'s' if len(runs) > 1 else ''} {names}{more}"
