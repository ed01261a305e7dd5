"""What callbacks hear of a training that is done elsewhere: the events of transformers' loop, from what the
lines of metrics.jsonl say.

1. Each optimizer step has its events once, in the order of steps, each with the state as it stood then, also
   where several steps have ended since somebody looked. What was known when it began has none.
2. The order is transformers': of a step its begin, its end, its row of the history; then what was measured
   after it; an epoch ends behind its last step, and what eval_strategy = "epoch" measures comes behind that.
   A step begins as soon as nothing is awaited any more that belongs before it.
3. Where nobody knows how many steps a pass over the data has, the whole training is one.
4. The best metric is kept as transformers keeps it, which EarlyStoppingCallback goes by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from quartet.scripts.callbacks import Callbacks, State
from quartet.scripts.outcome import Row

#: An event, and what it has by name beside what all have.
Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Moment:
    """What a line of metrics says."""

    #: Optimizer steps that are done.
    step: int
    #: Of the history, where one is due.
    row: Row | None
    is_evaluation: bool = False


@dataclass(frozen=True)
class Length:
    """How long a training is, in optimizer steps."""

    max_steps: int
    #: A pass over the data; None where nobody knows.
    steps_of_epoch: int | None
    #: Whether after so many there is an evaluation, whose line comes before that of the next step.
    is_measured_after: Callable[[int], bool]

    @property
    def epoch(self) -> int:
        """Steps of what counts as a pass."""
        return self.steps_of_epoch or max(self.max_steps, 1)


class Phase(Enum):
    """BETWEEN -> EPOCH -> STEP -> EPOCH -> ... -> BETWEEN; each by the event that it is called after."""

    BETWEEN = auto()
    EPOCH = auto()
    STEP = auto()


class Loop:
    """One training, as callbacks follow it."""

    def __init__(self, callbacks: Callbacks, args: Any, length: Length, known: Iterable[Moment]) -> None:
        """It goes on behind what is known."""
        self._callbacks, self._args, self._length = callbacks, args, length
        self._phase = Phase.BETWEEN
        self._has_stepped = False
        self._state = callbacks.state = State.of(args, length.max_steps, length.epoch)
        if args.metric_for_best_model is not None and args.greater_is_better is None:
            args.greater_is_better = not args.metric_for_best_model.endswith("loss")  # as transformers does
        #: After which step the last evaluation was.
        self._measured: int | None = None
        for moment in known:
            if moment.row is not None:
                self._state.log_history.append(moment.row)
            if moment.is_evaluation:
                self._compare(moment)
            else:
                self._advance(moment.step)

    @property
    def is_to_stop(self) -> bool:
        """Whether a callback wants the end, of a training that has steps left; not before its first one, as
        there."""
        control, state = self._callbacks.control, self._state
        if not self._has_stepped or state.global_step >= state.max_steps:
            return False
        if control.should_epoch_stop and not control.should_training_stop:
            # The last pass is the rest of the training.
            now, last = ((step - 1) // self._length.epoch for step in (state.global_step, state.max_steps))
            is_last = now == last
            if not is_last:
                self._callbacks.unserved("should_epoch_stop")
            return is_last
        return control.should_training_stop

    def begun(self) -> Iterator[Event]:
        """It begins."""
        self._callbacks.control.should_training_stop = False
        yield "on_train_begin", {}
        if not self._is_awaited:
            yield from self._next_step()

    def after(self, moment: Moment) -> Iterator[Event]:
        """A line was written."""
        if moment.is_evaluation:
            yield from self._evaluated(moment)
        else:
            for step in range(self._state.global_step + 1, moment.step + 1):
                if self._phase is not Phase.STEP:
                    yield from self._begin_step()
                self._advance(step)
                self._has_stepped, self._phase = True, Phase.EPOCH
                yield "on_step_end", {}
            yield from self._logged(moment.row)
            if self._args.eval_strategy == "epoch" or not self._is_awaited:
                yield from self._end_epoch()
        if not self._is_awaited:
            yield from self._next_step()

    def ended(self) -> Iterator[Event]:
        """It has ended, in order."""
        if self._phase is not Phase.BETWEEN:
            self._phase = Phase.BETWEEN
            yield "on_epoch_end", {}
        yield "on_train_end", {}

    @property
    def _is_awaited(self) -> bool:
        """Whether an evaluation is, where it stands."""
        step = self._state.global_step
        return self._measured != step and self._length.is_measured_after(step)

    def _advance(self, step: int) -> None:
        self._state.global_step, self._state.epoch = step, step / self._length.epoch

    def _next_step(self) -> Iterator[Event]:
        """Begins the step that follows, where one does."""
        is_over = self._state.global_step >= self._state.max_steps or self.is_to_stop
        if self._phase is not Phase.STEP and not is_over:
            yield from self._begin_step()

    def _begin_step(self) -> Iterator[Event]:
        yield from self._end_epoch()
        if self._phase is Phase.BETWEEN:
            self._phase, self._callbacks.control.should_epoch_stop = Phase.EPOCH, False
            yield "on_epoch_begin", {}
        control, self._phase = self._callbacks.control, Phase.STEP
        control.should_save = control.should_evaluate = control.should_log = False
        yield "on_step_begin", {}

    def _end_epoch(self) -> Iterator[Event]:
        """Where its last step is done."""
        if self._phase is Phase.EPOCH and not self._state.global_step % self._length.epoch:
            self._phase = Phase.BETWEEN
            yield "on_epoch_end", {}

    def _logged(self, row: Row | None) -> Iterator[Event]:
        if row is not None:
            self._state.log_history.append(row)
            self._callbacks.control.should_log = False
            yield "on_log", {"logs": _told(row)}

    def _evaluated(self, moment: Moment) -> Iterator[Event]:
        yield from self._logged(moment.row)
        self._callbacks.control.should_evaluate = False
        yield "on_evaluate", {"metrics": _told(moment.row or {})}
        self._compare(moment)
        yield from self._end_epoch()

    def _compare(self, moment: Moment) -> None:
        """Keeps the best, of evaluations behind the first step."""
        self._measured = moment.step
        asked, row = self._args.metric_for_best_model, moment.row or {}
        if asked is None or not moment.step:
            return
        name = asked if asked.startswith("eval_") else f"eval_{asked}"
        if name not in row:
            measured = ", ".join(key for key in row if key.startswith("eval_"))
            self._callbacks.warn(
                f"args.metric_for_best_model = {asked!r} is not measured, and nothing is the best by it; "
                f"there is {measured}"
            )
            return
        state, value = self._state, row[name]
        sign = 1 if self._args.greater_is_better else -1
        if state.best_metric is None:
            state.best_metric = -sign * math.inf
        if sign * value > sign * state.best_metric:
            state.best_metric, state.best_global_step = value, moment.step


def _told(row: Row) -> Row:
    """A row of the history as it is handed over: the step is the state's."""
    return {name: value for name, value in row.items() if name != "step"}
