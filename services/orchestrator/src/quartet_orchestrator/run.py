"""A run, from its first call to its last. This file is the algorithm; how each line survives a crash is told
elsewhere.

    wait for its turn, publish version 0, measure it
    for every batch s:
        wait until its groups of rollouts are complete        (those of later batches are under way meanwhile)
        close it: fix its groups
        learn from it: the trainer holds version s + 1, everybody else version s
        wait for who measures version s: this run, where that is due, or somebody who asked
        publish version s + 1, which admits more rollouts; or hand the batch to who trains and publishes
    export the model, measure it

Everything that happened is in the book. Started again at any point, the same lines run again and what is in
the book is not done twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import RunPhase

from quartet_orchestrator import state
from quartet_orchestrator.activity import Activity, named
from quartet_orchestrator.book import Book
from quartet_orchestrator.evaluation import Evaluation
from quartet_orchestrator.foreign import ForeignTraining
from quartet_orchestrator.on_demand import Measurable
from quartet_orchestrator.rollouts import Rollouts
from quartet_orchestrator.steps import record_step
from quartet_orchestrator.together import alongside, both
from quartet_orchestrator.training import NoRoom, Training

T = TypeVar("T")

# What a run does for less long is not worth a number.
STILL_S = 5.0


class StopAsked(Exception):
    """Somebody asked the run to stop, and no step is under way."""


class TrainingRun:
    """One run while it works in this process."""

    def __init__(
        self,
        book: Book,
        config: RunConfig,
        training: Training | ForeignTraining,
        rollouts: Rollouts,
        evaluation: Evaluation,
        measurable: Measurable,
        turn: Callable[[], Coroutine[Any, Any, None]],
        policy_ready: Callable[[], Coroutine[Any, Any, None]],
        compact: Callable[[], Coroutine[Any, Any, None]],
        troubles: Callable[[], list[str]],
    ) -> None:
        self._book = book
        self._config = config
        self._training = training
        # What hands its batches out, where somebody else trains them.
        self.foreign = training if isinstance(training, ForeignTraining) else None
        self._rollouts = rollouts
        self._evaluation = evaluation
        self._hold = measurable.hold
        self._turn = turn
        self._policy_ready = policy_ready
        self._compact = compact
        self._stop = asyncio.Event()
        # What others need to measure its policy.
        self.measurable = measurable
        # What keeps it from what it does, for people; empty where nothing does.
        self._troubles = troubles
        # For people, and since when it is more than waiting for its turn, on the monotonic clock.
        self.does(Activity.TURN)
        self.turn_at: float | None = None

    def told(self, before: Sequence[str]) -> str:
        """What it does, and what keeps it from that, for a person; `before` have their turn before it."""
        if self.turn_at is None:
            what = "stop them, or wait for their ends" if len(before) > 1 else "stop it, or wait for its end"
            return f"waits for its turn behind {named(before)}: {what}" if before else ""
        still_s = time.monotonic() - max(self._book.moved_at, self.turn_at)
        for_so_long = f" for {still_s:.0f} s" if still_s >= STILL_S else ""
        return "; ".join([f"{self.doing}{for_so_long}", *self._troubles()])

    def does(self, activity: Activity, step: int = 0) -> None:
        """From here on, as whoever asks is told."""
        self.activity, self.doing = activity, activity.words(step)

    def stop(self) -> None:
        """Ends the run after the step under way."""
        self._stop.set()

    async def execute(self) -> None:
        """Works until the run is COMPLETED. Raises StopAsked after `stop`, else why the run cannot go on."""
        await self._unless_stopped(self._open())
        await alongside(self._all_steps(), self._training.guard())
        await self.close(goes_on=False)
        self._book.enter(state.COMPLETED)

    async def _open(self) -> None:
        """Returns once it is the run's turn, and the trainer has it."""
        while True:
            await self._turn()
            self.turn_at = time.monotonic()
            self.does(Activity.OPENING)
            try:
                await self._training.open()
            except NoRoom:
                self.does(Activity.TURN)
                self.turn_at = None
            else:
                return

    async def close(self, *, goes_on: bool) -> None:
        """The end of the run here, for now or for good: other runs get its place on the trainer."""
        run_id = self._book.state.run_id
        self.does(Activity.CLOSING)
        self._hold.end(
            QuartetError("RUN_NOT_SERVED", f"run {run_id!r} came to its end meanwhile", want=run_id)
        )
        await self._training.close(goes_on=goes_on)

    async def closed(self) -> bool:
        """Returns once the trainer has heard of that, however long it is away; whether it was."""
        return await self._training.closed()

    async def _all_steps(self) -> None:
        last = self._config.max_steps
        self.does(Activity.VERSION)
        await self._unless_stopped(self._policy_ready())
        if self._book.state.step not in self._book.state.batches:
            self._hold.moved()  # else its next version may be published already
        if self._book.state.step == 0:
            await self._measure(0)
        if self._book.state.step < last:
            self._enter(state.TRAINING)
            await alongside(self._steps(), self._rollouts.flow())
        self.does(Activity.EXPORTING)
        await self._training.save(last - 1)
        await self._measure(last)
        await self._still_held()

    async def _steps(self) -> None:
        for batch in range(self._book.state.step, self._config.max_steps):
            version = batch * self._config.versions_per_step
            with tracing.span(
                "step", root=True, run_id=self._book.state.run_id, step=batch + 1, policy_version=version
            ):
                await self._step(batch)

    async def _step(self, batch: int) -> None:
        await both(self._learn(batch), self._measure_meanwhile(batch))
        if self._still_due(batch):
            raise StopAsked
        await self._still_held()
        self.does(Activity.TRAINING, batch + 1)
        published = self._training.publish(batch)
        await (self._unless_stopped(published) if self._training.MAY_BREAK_OFF else published)
        await record_step(self._book, self._config, batch, await self._training.trained(batch))
        self._rollouts.published(batch + 1)
        self._hold.moved()
        if batch + 1 < self._config.max_steps:
            self.does(Activity.SAVING, batch + 1)
            await self._training.save(batch)
            await self._compact()

    async def _learn(self, batch: int) -> None:
        """All of a step that leaves the version before it the last one."""
        self.does(Activity.ROLLOUTS, batch + 1)
        with tracing.span("rollouts"):
            groups = await self._unless_stopped(self._rollouts.batch(batch))
        if batch not in self._book.state.batches:
            self._book.write(batch={"batch": batch, "groups": [group.number for group in groups]})
        self.does(Activity.TRAINING, batch + 1)
        await self._training.learn(batch)
        if self._still_due(batch):
            self.does(Activity.EVALUATING, batch)

    async def _measure_meanwhile(self, version: int) -> None:
        """Evaluates the version that a step begins with, where that is due. A stop leaves it due, and the
        trainer's work beside it its end."""
        if self._still_due(version):
            with suppress(StopAsked):
                await self._unless_stopped(self._evaluation.measure(version))

    def _still_due(self, version: int) -> bool:
        """Not of a version that another took the place of, before somebody asked for it to be measured."""
        return self._evaluation.due(version) and not self._training.has_published(version)

    async def _measure(self, version: int) -> None:
        """Evaluates the first version, or the last, where that is due."""
        if self._evaluation.due(version):
            self._enter(state.EVALUATING)
            self.does(Activity.EVALUATING, version)
            await self._unless_stopped(self._evaluation.measure(version))

    async def _still_held(self) -> None:
        """Waits for those who measure the version that is not the last one much longer; where there are any,
        a stop leaves the step here."""
        self.does(Activity.HELD)
        move = self._hold.move()
        await (self._unless_stopped(move) if self._hold.is_held else move)

    def _enter(self, phase: RunPhase) -> None:
        if self._stop.is_set():
            raise StopAsked
        self._book.enter(phase)

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Waits for something that may be broken off at any point because all of it is in the book."""
        if self._stop.is_set():
            waiting.close()
            raise StopAsked
        stop = asyncio.create_task(self._stop.wait())
        work = asyncio.create_task(waiting)
        try:
            await asyncio.wait({stop, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StopAsked
            return work.result()
        finally:
            for task in (stop, work):
                task.cancel()
            await asyncio.gather(stop, work, return_exceptions=True)
