"""The task that a run works in: begun, broken off to begin again, and what its end makes of the run.

1. A run works in one task. How the task ends decides the phase: COMPLETED, STOPPED (asked to, or a service
   stayed away), FAILED. A process that ends leaves the phase as it is. Of what rests only the book stays,
   and the task until the trainer has heard of it (closing.py).
2. A run that is found unfinished after a restart goes on by itself. One whose configuration this version
   refuses, or whose disk is full, is STOPPED, and one that was STOPPING is stopped: in each case the trainer
   closes it first. One that had FAILED but for the record of it is FAILED (ending.CUT_SHORT).
3. One that is broken off goes on from its book with what was asked for last, and keeps its turn.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable
from contextlib import suppress

import structlog
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.kit.shielded import shielded
from quartet.run.config import RunConfig

from quartet_orchestrator import closing, ending, going_on, state
from quartet_orchestrator.assembly import Services, assemble
from quartet_orchestrator.held import Held
from quartet_orchestrator.outage import RunFailed, RunInterrupted
from quartet_orchestrator.run import StopAsked, TrainingRun
from quartet_orchestrator.together import first_cause


def launch(held: Held, services: Services) -> None:
    """Begins to work at a run whose configuration is not refused."""
    assert held.config is not None
    if held.task is not None:
        held.task.cancel()  # it waits for a trainer that is away, to tell it that the run has ended
    closing.forget(held.book)
    held.run = assemble(held.book, held.config, services)
    # A context of its own: the run outlives the call that submitted it, and its deadline.
    held.task = asyncio.create_task(
        _live(held, held.run, services),
        name=f"run-{held.book.state.run_id}",
        context=contextvars.Context(),
    )


async def carry_out_otherwise(held: Held, services: Services, config_toml: str, config: RunConfig) -> None:
    """The same run, carried out as `config` says from here on, unless that is changed meanwhile or the run is
    over. Raises QuartetError."""
    known = held.config
    assert known is not None

    def change() -> None:
        going_on.change(held.book, known, config_toml, config)
        held.config = config

    async def again() -> None:
        # To its end, also where the caller has left: it would stand still.
        await shielded(asyncio.create_task(begin_again(held, services)))

    while held.config is known and not going_on.is_over(held.book.state):
        await going_on.carry_out(held.book, change, again)


def take_up(held: Held, services: Services, refusal: str) -> None:
    """Goes on with a run that was found again; `refusal` says why it has no configuration."""
    book = held.book
    if book.state.phase in state.RESTING:
        save_at = closing.untold(book)
        if save_at is not None and services.trainer is not None:
            told = closing.at_last(book, services.trainer, save_at)
            held.task = asyncio.create_task(_left_there(told, services))
        return
    if book.state.ledger.discarded[state.RUN_FAILED]:
        cut_short = RunFailed(ending.CUT_SHORT)
        ended = ending.without_config(book, services.trainer, cut_short)
        held.task = asyncio.create_task(_left_there(ended, services))
        return
    stopping = book.state.phase == state.STOPPING
    if held.config is None:
        remedy = (
            "mend that and start the orchestrator again, or the version that it was submitted to, then "
            "resume it; or submit a new run"
        )
        cause = StopAsked() if stopping else RunInterrupted(f"{refusal}; {remedy}")
        if not stopping:
            with suppress(OSError):  # a full disk; the end is written down once it is not
                book.enter(state.STOPPING, error=str(cause))
        ended = ending.without_config(book, services.trainer, cause)
        held.task = asyncio.create_task(_left_there(ended, services))
        return
    if not stopping:
        try:
            book.note(f"the orchestrator started again; going on at step {book.state.step}")
        except OSError as error:  # a full disk, as if the run had met it
            ended = ending.without_config(book, services.trainer, error)
            held.task = asyncio.create_task(_left_there(ended, services))
            return
    launch(held, services)
    if stopping:
        assert held.run is not None
        held.run.stop()


async def _left_there(work: Awaitable[None], services: Services) -> None:
    """Waits for the end of a run that has no turn here, and had a place on the trainer."""
    await work
    services.turns.has_room()


async def begin_again(held: Held, services: Services) -> None:
    """Breaks a run off where it stands; it goes on from its book."""
    if held.run is None or held.begins_again:
        return  # it came to its end, or is broken off and goes on with what was asked for last
    assert held.task is not None
    run_id = held.book.state.run_id
    held.begins_again = True
    why = f"run {run_id!r} goes on with other settings; ask again"
    held.run.measurable.hold.end(QuartetError("RUN_NOT_SERVED", why, want=run_id))
    if held.run.foreign is not None:
        held.run.foreign.break_off()
    held.task.cancel()
    await asyncio.wait({held.task})
    held.begins_again = False
    if held.book.state.phase in state.RESTING:
        services.turns.leave(run_id)  # it came to its end in this moment
        return
    launch(held, services)
    if held.book.state.phase == state.STOPPING:
        held.run.stop()


async def _live(held: Held, run: TrainingRun, services: Services) -> None:
    """Executes the run and writes down how it ended."""
    book = held.book
    structlog.contextvars.bind_contextvars(run_id=book.state.run_id)
    tracing.about(book.state.run_id)
    try:
        await run.execute()
    except Exception as raised:  # noqa: BLE001 - the end of a run's task: every way to end becomes a phase
        cause = first_cause(raised)
        await run.close(goes_on=isinstance(cause, ending.RESUMABLE))
        await ending.write_down(book, cause)
    finally:
        if not held.begins_again:
            services.turns.leave(book.state.run_id)
    book.rest_if_idle()
    await services.teachers.left(book.state.run_id)
    # Unless it was resumed, or made longer, meanwhile.
    if held.run is run and book.state.phase in state.RESTING:
        held.run = None
        if await run.closed():
            services.turns.has_room()
        held.task = None
