"""Going on with a run that rests: resumed as it was, or extended to more steps.

1. It takes place when it is written down, or not at all; asked for twice at once it takes place once.
2. Resumed is what is STOPPED, and what FAILED before this part of it dispatched a group: a model that was
   missing may be there now, and with nothing sampled there is nothing to sample or to train twice.
3. Extended is what is COMPLETED, by a configuration that differs in a larger max_steps alone. Whoever asks
   for anything else is told what works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quartet.errors import QuartetError
from quartet.kit.unknown import enum_name
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import state
from quartet_orchestrator.book import Book
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.state import RunState


async def begin(book: Book, write: Callable[[], None]) -> bool:
    """Opens the book of a run that rests, and begins another part of it by what `write` writes. Whether it
    did: somebody else may have done it meanwhile. Raises QuartetError."""
    phase = book.state.phase
    with written(book.state.run_id):
        try:
            await book.opened()
            if book.state.phase != phase:
                return False
            write()
            return True
        finally:
            book.rest_if_idle()


@contextmanager
def written(run_id: str) -> Iterator[None]:
    """What a caller asks for takes place when it is written down, or not at all."""
    try:
        yield
    except JournalCorrupt as error:
        raise QuartetError("CHECKSUM_MISMATCH", str(error), run_id=run_id) from error
    except OSError as error:
        raise QuartetError(
            "NOT_READY",
            f"the journal of run {run_id!r} cannot be written, so nothing was changed: {error}; make "
            "room and ask again",
            run_id=run_id,
        ) from error


def check_resumable(run: RunState) -> None:
    """Refuses a run whose end is for good. Raises INVALID_REQUEST."""
    if run.phase == state.COMPLETED:
        remedy = f"to go on with it, submit it again with max_steps above {run.max_steps}"
    elif _failed_for_good(run):
        remedy = "submit a new run"
    else:
        return
    raise QuartetError(
        "INVALID_REQUEST",
        f"run {run.run_id!r} is {_name(run.phase)} and cannot be resumed; {remedy}",
        field="run_id",
        value=run.run_id,
        remedy=remedy,
    )


def check_extends(run: RunState, known: RunConfig | None, asked: RunConfig) -> None:
    """Refuses another configuration of a run, unless it is its own with more steps. Raises RUN_CONFLICT."""
    exists = f"run {run.run_id!r} exists with another configuration"
    if known is None or not known.model_copy(update={"max_steps": asked.max_steps}).is_same_run(asked):
        raise _conflict(run, "config_toml", f"{exists}; choose another run_id")
    steps = f"{exists}: max_steps is {known.max_steps} there, not {asked.max_steps}"
    if asked.max_steps < known.max_steps:
        raise _conflict(
            run,
            "max_steps",
            f"{steps}; a run is made longer, once it is COMPLETED, and never shorter: choose another run_id",
        )
    if _failed_for_good(run):
        raise _conflict(run, "max_steps", f"{steps}; it is FAILED at step {run.step}: submit a new run")
    if run.phase != state.COMPLETED:
        raise _conflict(
            run,
            "max_steps",
            f"{steps}; it is {_name(run.phase)} at step {run.step}, and a run is made longer once it is "
            f"COMPLETED: let it go on to its {known.max_steps} steps, then submit it with {asked.max_steps}",
        )


def _failed_for_good(run: RunState) -> bool:
    return run.phase == state.FAILED and run.next_group > run.first_group


def _conflict(run: RunState, field: str, message: str) -> QuartetError:
    return QuartetError("RUN_CONFLICT", message, run_id=run.run_id, field=field)


def _name(phase: pb.RunPhase) -> str:
    return enum_name(pb.RunPhase, phase)
