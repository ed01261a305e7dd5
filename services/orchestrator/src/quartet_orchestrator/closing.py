"""Closing: frees what the trainer holds in memory for a run that ends here, for now or for good.

1. A run that goes on later is saved first, where every answer so far is on disk here. That takes minutes
   where the model is large: a trainer that is there is waited for, and people are told.
2. A run of that name which was driven by somebody else stays as it is.
3. A trainer that is away is not waited for. It is asked again, after growing pauses, for as long as the run
   rests, also by the next process (a file beside the journal): one that was frozen or cut off would keep
   place and memory of the run for good. One that was started again knows nothing of it. A run that goes on
   has another end, which decides anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as tpb

from quartet_orchestrator.book import Book
from quartet_orchestrator.outage import backoff_s
from quartet_orchestrator.trainer_client import TrainerClient

#: In the folder of a run that the trainer has not heard the end of: the call that it is saved at.
UNTOLD: Final = "untold"
#: How often a trainer that has not closed the run yet is asked whether it is there.
LOOK_S = 8.0

log = structlog.get_logger()


async def close(book: Book, client: TrainerClient, *, goes_on: bool, opened: bool) -> int | None:
    """Asks the trainer to close the run; `opened` where it said to this process that it has ours.

    Where it does not answer: what `at_last` needs to know.
    """
    run_id, save_at = book.state.run_id, 0
    try:
        # A trainer that comes back from a saved state has none of the answers before it.
        await book.settled()
        save_at = book.state.applied_seq_id if goes_on else 0
    except OSError as error:
        log.warning("run closed without its state", run_id=run_id, why=str(error))
    try:
        if opened or not await _is_somebodys(book, client):
            await _closed(book, client, save_at, lambda: _tell(book) if save_at else None)
    except QuartetError as error:
        log.warning("run not closed on the trainer", run_id=run_id, why=error.message)
        _keep(book, save_at)
        return save_at
    forget(book)
    return None


def untold(book: Book) -> int | None:
    """What a process before this one left for `at_last` to be done."""
    try:
        return int(_file(book).read_text())
    except ValueError:
        return 0  # a full disk took the file's name and nothing more
    except OSError:
        return None


def forget(book: Book) -> None:
    """Nothing is left to be done: the trainer has heard of the end, or the run goes on."""
    with suppress(OSError):
        _file(book).unlink()


async def at_last(book: Book, client: TrainerClient, save_at: int) -> None:
    """Returns once the trainer has closed the run, saved where it stands at that call, or has somebody
    else's."""
    tries, run_id = 0, book.state.run_id
    while True:
        await asyncio.sleep(backoff_s(tries))
        tries += 1
        try:
            if not await _is_somebodys(book, client):
                await _closed(book, client, save_at)
                log.info("run closed on the trainer", run_id=run_id, tries=tries)
            forget(book)
            return
        except QuartetError as error:
            log.debug("run not closed on the trainer", run_id=run_id, why=error.message)


async def _closed(
    book: Book, client: TrainerClient, save_at: int, on_wait: Callable[[], None] = lambda: None
) -> None:
    """Returns once the trainer has closed the run; `on_wait` is called once where that takes its time. Raises
    QuartetError, also where it does not say meanwhile that it is there."""
    closing = asyncio.create_task(client.close_run(book.state.run_id, save_at))
    told = False
    try:
        while not (await asyncio.wait({closing}, timeout=LOOK_S))[0]:
            if not told:
                on_wait()
            told = True
            await _is_somebodys(book, client)
        closing.result()
    finally:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


def _tell(book: Book) -> None:
    with suppress(OSError):  # a full disk: the log has it
        book.note("waiting for the trainer, which saves where the run stands; then it is STOPPED")


def _keep(book: Book, save_at: int) -> None:
    try:
        _file(book).write_text(f"{save_at}\n")
    except OSError as error:
        log.warning("only this process will tell the trainer", run_id=book.state.run_id, why=str(error))


def _file(book: Book) -> Path:
    return book.folder / UNTOLD


async def _is_somebodys(book: Book, client: TrainerClient) -> bool:
    """One that is no further than ours is taken for ours: a run does not say what it was made of. Raises
    QuartetError where the trainer does not say: it may be back for the next call, with somebody's run."""
    try:
        there = await client.get(book.state.run_id)
    except QuartetError as error:
        if error.reason != "RUN_UNKNOWN":
            raise
        return False  # it is being created, or there is none
    return is_ahead(there, book.state.applied_seq_id)


def is_ahead(there: tpb.RunState, applied_seq_id: int) -> bool:
    """Whether the trainer's run was driven further than a journal with so many answers ever asked."""
    return there.applied_seq_id > applied_seq_id + 1
