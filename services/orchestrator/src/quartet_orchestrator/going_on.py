"""Going on with a run that rests: resumed as it was, or extended to more steps.

1. It takes place when it is written down, or not at all; asked for twice at once it takes place once.
2. Resumed is what is STOPPED, and what FAILED before this part of it dispatched a group: a model that was
   missing may be there now. What the parts before it left in flight is kept for that (ending.py).
3. Extended is what is COMPLETED, by a configuration that differs in a larger max_steps alone, and in how the
   run is carried out (quartet/run/operation.py). Whoever asks for anything else is told what works.
4. How a run is carried out is changed while it can still go on: from the step on that is not applied yet,
   and a note says what. One that works is broken off for that and begins again where it stands, as after a
   restart of this process; its turn stays its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from quartet.errors import QuartetError
from quartet.kit.unknown import enum_name
from quartet.run.config import RunConfig
from quartet.run.operation import carried_out_as, computes_the_same, differences
from quartet.run.written_out import is_same_run
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import state
from quartet_orchestrator.book import Book
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.state import RunState

# Whoever resumes a run waits for so long for a stop under way, and not until his call is out of time.
STOP_S = 20.0
# Of a configuration, that are told.
MAX_DIFFERENCES = 4


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


async def stopped(book: Book, told: Callable[[], str]) -> None:
    """When a stop under way is over; `told` says what it waits for. Raises INVALID_REQUEST after STOP_S."""
    try:
        async with asyncio.timeout(STOP_S):
            while book.state.phase == state.STOPPING:
                await book.changed()
    except TimeoutError:
        run_id, then = book.state.run_id, "resume it once it is STOPPED"
        raise QuartetError(
            "INVALID_REQUEST",
            f"run {run_id!r} is STOPPING ({told()}); {then}",
            field="run_id",
            value=run_id,
            remedy=then,
        ) from None


def asked_of_trainer(config: RunConfig, step: int) -> RunConfig:
    """What a trainer is asked about a run that goes on after so many steps: it begins with a state of its own
    then, and what it once began with may be gone."""
    if not step:
        return config
    lora = config.lora.model_copy(update={"initial_adapter": None})
    return config.model_copy(update={"initial_state": None, "initial_optimizer": "continued", "lora": lora})


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
    longer = known and known.model_copy(update={"max_steps": asked.max_steps})
    if known is None or longer is None or not computes_the_same(longer, asked):
        told = differences(carried_out_as(longer, asked), asked)[:MAX_DIFFERENCES] if longer else []
        why = f": {', '.join(told)}" if told else ""
        raise _conflict(run, "config_toml", f"{exists}{why}; choose another run_id")
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
        how = "resume it, and let it go on" if run.phase in state.RESTING else "let it go on"
        raise _conflict(
            run,
            "max_steps",
            f"{steps}; it is {_name(run.phase)} at step {run.step}, and a run is made longer once it is "
            f"COMPLETED: {how} to its {known.max_steps} steps, then submit it with {asked.max_steps}",
        )


def change(book: Book, known: RunConfig, config_toml: str, asked: RunConfig) -> None:
    """Writes down what is carried out otherwise from here on; nothing where that is as it was."""
    otherwise = carried_out_as(known, asked)
    if not is_same_run(known, otherwise):
        told = "; ".join(differences(known, otherwise))
        book.change(config_toml, known.ckpt, f"goes on with other settings: {told}")


async def carry_out(
    book: Book, write: Callable[[], None], begin_again: Callable[[], Awaitable[None]]
) -> None:
    """Lets `write` write down how a run that is not over is carried out from here on, where its phase is one
    to do it in, or waits for one. `begin_again` is for a run that works."""
    if book.state.phase == state.STOPPING:
        await book.changed()
    elif book.state.phase in state.RESTING:
        await begin(book, write)
    else:
        with written(book.state.run_id):
            write()
        await begin_again()


def is_over(run: RunState) -> bool:
    """Whether there is nothing left of it to carry out, but for an extension."""
    return run.phase == state.COMPLETED or _failed_for_good(run)


def _failed_for_good(run: RunState) -> bool:
    if run.phase == state.STOPPED:  # by an earlier release, after it had failed (ending.CUT_SHORT)
        return run.ledger.discarded[state.RUN_FAILED] > 0
    return run.phase == state.FAILED and run.dispatched_in_part


def _conflict(run: RunState, field: str, message: str) -> QuartetError:
    return QuartetError("RUN_CONFLICT", message, run_id=run.run_id, field=field)


def _name(phase: pb.RunPhase) -> str:
    return enum_name(pb.RunPhase, phase)
