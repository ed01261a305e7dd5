"""A run in this process: its book, and what works at it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quartet.errors import QuartetError
from quartet.kit.unknown import enum_name
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import state
from quartet_orchestrator.book import Book
from quartet_orchestrator.foreign import RolloutStream
from quartet_orchestrator.gauges import Glance, UnderWay
from quartet_orchestrator.on_demand import Measurable
from quartet_orchestrator.run import TrainingRun
from quartet_orchestrator.watchdog import Moving


@dataclass
class Held:
    """One of the runs of a folder."""

    book: Book
    # None where this version refuses what an earlier one accepted.
    config: RunConfig | None
    run: TrainingRun | None = None
    task: asyncio.Task[None] | None = None
    # Whether it is broken off to go on at once, so that its turn stays its own.
    begins_again: bool = False

    def active(self) -> TrainingRun:
        """What works at it. Raises RUN_NOT_SERVED where nothing does."""
        run_id, phase = self.book.state.run_id, self.book.state.phase
        if phase in state.RESTING or phase == state.STOPPING or self.run is None:
            name = enum_name(pb.RunPhase, phase)
            if self.book.waits and phase not in state.RESTING:
                why = f"is {name} and {self.book.waits}; then it is STOPPED: resume it"
                raise QuartetError("RUN_NOT_SERVED", f"run {run_id!r} {why}", want=run_id)
            measure = "measure its model with quartet eval, or submit a new one"
            remedy = measure if phase == state.COMPLETED else "resume it, or submit a new one"
            why = f"is {name}, and nobody keeps its policy served; {remedy}"
            raise QuartetError("RUN_NOT_SERVED", f"run {run_id!r} {why}", want=run_id)
        return self.run

    def measurable(self) -> Measurable:
        """What others need to measure its policy. Raises RUN_NOT_SERVED."""
        run = self.active()
        if run.turn_at is None:
            run_id = self.book.state.run_id
            why = "waits for its turn, and is not served yet; ask again when it has begun"
            raise QuartetError("RUN_NOT_SERVED", f"run {run_id!r} {why}", want=run_id)
        return run.measurable

    def stream(self) -> RolloutStream | None:
        """Of its batches, which somebody else trains; None where all are trained. Raises QuartetError."""
        if self.config is not None and not self.config.external_trainer:
            run_id = self.book.state.run_id
            why = "is trained by Quartet's trainer; submit one with external_trainer = true"
            raise QuartetError("INVALID_REQUEST", f"run {run_id!r} {why}", field="run_id", value=run_id)
        if self.book.state.phase == state.COMPLETED:
            return None
        run = self.active()
        assert run.foreign is not None
        return run.foreign.stream()

    def moving(self) -> Moving | None:
        """How it moves, where it should."""
        run, phase = self.run, self.book.state.phase
        if run is None or run.turn_at is None or phase in state.RESTING:
            return None
        # It may have waited for its turn for hours.
        return Moving(self.book.state.run_id, max(self.book.moved_at, run.turn_at), run.doing)

    def glance(self) -> Glance:
        """What is told of it."""
        run = self.run
        if run is None or self.book.state.phase in state.RESTING:
            return Glance(self.book.state)
        return Glance(self.book.state, UnderWay(run.activity, run.turn_at, self.book.moved_at))
