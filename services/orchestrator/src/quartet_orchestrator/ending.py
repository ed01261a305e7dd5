"""How a run ended: which phase each cause leads to, written down as soon as the journal takes it.

FAILED is for good, once rollouts were sampled: so it is left to RunFailed, where the run itself is at an end.
What a service refuses, and a fault of the orchestrator's own, can be mended, and the journal is whole:
STOPPED. Before there are rollouts to keep these two are FAILED, which begins again when it is resumed.

Each end is one record, or, of a run that is interrupted, two that both tell the reason: a kill between them
loses neither.
"""

from __future__ import annotations

import asyncio

import structlog
from quartet.errors import QuartetError

from quartet_orchestrator import closing, journal, state
from quartet_orchestrator.book import Book
from quartet_orchestrator.outage import RunFailed, RunInterrupted
from quartet_orchestrator.run import StopAsked
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.trainer_client import TrainerClient

log = structlog.get_logger()

# What leaves a run STOPPED: it can be resumed.
RESUMABLE = (StopAsked, RunInterrupted, OSError, JournalCorrupt)

# Of a run whose groups an earlier release gave up, because it failed, without coming to write that down.
CUT_SHORT = (
    "the run had failed, and was ended before its journal said why (the orchestrator's log of that time "
    "does); submit a new run"
)


async def without_config(book: Book, trainer: TrainerClient | None, cause: Exception) -> None:
    """The end of a run that an earlier process worked at and this one cannot: all that is known of it here is
    in its book."""
    untold = None
    if trainer is not None:
        untold = await closing.close(book, trainer, goes_on=isinstance(cause, RESUMABLE), opened=False)
    await write_down(book, cause)
    book.rest_if_idle()
    if trainer is not None and untold is not None:
        await closing.at_last(book, trainer, untold)


async def write_down(book: Book, cause: BaseException) -> None:
    """How the run ended, as soon as its journal takes it."""
    while True:
        try:
            return _ended(book, cause)
        except OSError as error:
            log.error("the journal cannot be written", why=str(error))
        await asyncio.sleep(journal.AGAIN_S)


def _ended(book: Book, cause: BaseException) -> None:
    match cause:
        case StopAsked():
            # Also what an earlier process was interrupted by, and had no time to end with.
            book.enter(state.STOPPED, error=book.state.error)
        case _ if isinstance(cause, RESUMABLE):
            _interrupt(book, str(cause))
        case RunFailed():
            _fail(book, str(cause))
        case _ if book.state.dispatched_in_part:
            _interrupt(book, f"{_said(cause)}; mend that, then resume the run")
        case _:
            _fail(book, _said(cause))


def _said(cause: BaseException) -> str:
    if isinstance(cause, QuartetError):
        return cause.message
    log.error("a fault of the orchestrator", exc_info=cause)
    return f"a fault of the orchestrator ({type(cause).__name__}); its log has the details"


def _interrupt(book: Book, why: str) -> None:
    log.warning("run interrupted", why=why)
    if book.state.phase != state.STOPPING:
        book.enter(state.STOPPING, error=why)
    book.enter(state.STOPPED, error=why)


def _fail(book: Book, error: str) -> None:
    log.error("run failed", why=error)
    book.enter(state.FAILED, error=error)
