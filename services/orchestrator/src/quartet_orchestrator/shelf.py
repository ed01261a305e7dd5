"""The shelf: the books of all runs, found again when the orchestrator starts.

1. A book that cannot be read, damaged or written by a newer release, is set aside, with the reason and what
   to do; the others open. Its segments stay as they are. One that the disk, or this process, keeps from being
   opened now is set aside until it can be (`passes`).
2. A folder without segments is no run's and is left alone. One whose first records are not on disk is an
   aborted submission: the journal's own files in it are removed.
3. A run's folder has the run's name. Under another name it is a copy, and set aside: two books of one run
   would drive one trainer.
4. The books that were written last are opened first, for READ_S. Those that are unread then are set aside
   until they are read, and keep nobody from going on: an old folder has many that rest.
5. One orchestrator has the shelf at a time, by a lock beside the folder: the books of runs that rest are
   closed and hold none. A second one, or one that finds a book held, gets a ConfigError.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import structlog
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.folder import flush, lock_file
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import journal, state
from quartet_orchestrator.admission import Environments
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import FILES
from quartet_orchestrator.records import JournalNewer
from quartet_orchestrator.segments import JournalCorrupt, named

#: A step that a run has made takes some tenths of a millisecond to read, one of large batches more than one.
READ_S: Final = 5.0

#: No run's folder begins with "@". Of these runs, which were deleted, the trainer's states are still to go
#: (deletion.py), ...
DELETING: Final = "@deleting-"
#: ... and these nobody needs any more.
DELETED: Final = "@deleted-"

log = structlog.get_logger()


@dataclass(frozen=True)
class Shelf:
    """By run id: the books, and why the others cannot be used. Nobody else has it until it is closed."""

    lock: IO[bytes]
    books: dict[str, Book]
    set_aside: dict[str, QuartetError]
    # Of these, what is still to be read, in that order.
    unread: list[str]

    def close(self) -> None:
        """Closes every book, then lets the folder go."""
        for book in self.books.values():
            book.close()
        self.lock.close()


def open_all(folder: Path) -> Shelf:
    """Opens the books of the folder's runs, as many as READ_S has time for, and one at least."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shelf = Shelf(lock_file(folder.with_name(f"{folder.name}.lock")), {}, {}, [])
    except BlockingIOError:
        raise _in_use(f"{folder} is held by another orchestrator; stop it first") from None
    with ExitStack() as failed:
        failed.callback(shelf.close)
        until = time.monotonic() + READ_S
        for path in sorted((path for path in folder.iterdir() if path.is_dir()), key=_written, reverse=True):
            if path.name.startswith((DELETING, DELETED)):
                continue  # it is no run any more
            if shelf.books and time.monotonic() > until:
                shelf.set_aside[path.name] = _unread(path.name)
                shelf.unread.append(path.name)
                continue
            try:
                book = open_one(path)
            except BlockingIOError as error:
                raise _in_use(str(error)) from error
            except QuartetError as error:
                log.error("run set aside", run_id=path.name, why=error.message)
                shelf.set_aside[path.name] = error
                continue
            if book is not None:
                shelf.books[path.name] = book
        failed.pop_all()
    return shelf


def open_one(path: Path) -> Book | None:
    """The book of the run in a folder; None where there is no run, or an aborted submission, which is gone
    then. Raises BlockingIOError where another process holds it, and QuartetError: why it cannot be used."""
    try:
        if not _has_segments(path):
            log.warning("not a run, left alone", folder=str(path))
            return None
        book = Book(path)
        if book.state.phase == state.UNSPECIFIED:
            book.close()
            remove(path)
            log.warning("removed an aborted submission", folder=str(path))
            return None
    except BlockingIOError:
        raise
    except (JournalCorrupt, OSError) as error:
        raise _unreadable(path, error) from error
    if book.state.run_id != path.name:
        run_id = book.state.run_id
        book.close()
        raise _set_aside(
            path, "INVALID_REQUEST", f"it holds the run {run_id!r} under another name; move it elsewhere"
        )
    return book


def _written(folder: Path) -> tuple[float, str]:
    """When something was written there last; what cannot be looked at comes last."""
    with suppress(OSError), os.scandir(folder) as entries:
        return max((entry.stat().st_mtime for entry in entries), default=0.0), folder.name
    return 0.0, folder.name


def _has_segments(folder: Path) -> bool:
    with named(folder, "read"), suppress(FileNotFoundError):  # somebody has removed it
        return any(name.endswith(".seg") for name in os.listdir(folder))
    return False


def passes(why: QuartetError) -> bool:
    """Whether a run that was set aside goes on as soon as its disk, or this process, lets it."""
    return why.reason == "NOT_READY"


def _in_use(why: str) -> ConfigError:
    return ConfigError(f"data_dir is in use: {why}, or set another data_dir")


def _unreadable(folder: Path, error: JournalCorrupt | OSError) -> QuartetError:
    """Why a run's book cannot be used, as its callers get it."""
    if isinstance(error, JournalNewer):
        return _set_aside(
            folder,
            "NOT_IMPLEMENTED",
            f"its journal was written by a newer release: {error}; start the orchestrator of that release",
        )
    if isinstance(error, JournalCorrupt):
        return _set_aside(
            folder,
            "CHECKSUM_MISMATCH",
            f"its journal is damaged: {error}; restore the folder from a copy and start the orchestrator "
            "again, or submit the run under another run_id (docs/journal.md tells what can be rescued)",
        )
    why = (
        f"its journal cannot be opened: {error}; mend that: it is tried again every {journal.AGAIN_S:g} s; "
        "or delete the run"
    )
    return QuartetError("NOT_READY", f"run {folder.name!r} waits: {why}", run_id=folder.name)


def _unread(run_id: str) -> QuartetError:
    why = "its journal is read after those that were written later; nothing has to be done"
    return QuartetError("NOT_READY", f"run {run_id!r} waits: {why}", run_id=run_id)


def faulty(run_id: str, error: Exception) -> QuartetError:
    """Why a run whose book is well does not go on: no fault of its own."""
    why = f"a fault of the orchestrator ({type(error).__name__}); its log has the details"
    then = "start the orchestrator again once that is mended"
    return QuartetError("INTERNAL", f"run {run_id!r} is set aside: {why}; {then}", run_id=run_id)


def new_book(folder: Path, config_toml: str, config: RunConfig, environments: Environments) -> Book:
    """The book of a run that is submitted, named as its folder; or nothing is left. Raises INTERNAL."""
    run_id = folder.name
    try:
        book = Book(folder)
        try:
            book.write(
                submitted={
                    "run_id": run_id,
                    "config_toml": config_toml,
                    "environments": environments.train,
                    "eval_environments": environments.eval,
                }
            )
            pending = book.run()
            pending.phase, pending.max_steps, pending.last_event = state.PENDING, config.max_steps, 1
            book.write(phase=pb.PhaseEvent(run=pending))
            flush(folder.parent)
        except OSError:
            book.close()
            remove(folder)
            raise
    except OSError as error:
        raise QuartetError(
            "INTERNAL", f"the journal of run {run_id!r} cannot be written: {error}", run_id=run_id
        ) from error
    return book


async def settled(book: Book, warning: str, note: str) -> None:
    """Returns once a run that was submitted, with a warning and a note if there are any, survives a power
    cut. Raises INTERNAL; there is a run then, too."""
    try:
        if note:
            book.note(note)
        if warning:
            book.note(warning, warning=True)
        await book.settled()
    except OSError as error:
        run_id = book.state.run_id
        raise QuartetError(
            "INTERNAL",
            f"run {run_id!r} was accepted, but its journal is not safe on the disk: {error}; mend that, "
            "and ask for the run's status",
            run_id=run_id,
        ) from error


def remove(folder: Path) -> None:
    """Removes a journal, and its folder unless somebody put something else there."""
    for pattern in FILES:
        for path in folder.glob(pattern):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _set_aside(folder: Path, reason: str, why: str) -> QuartetError:
    return QuartetError(reason, f"run {folder.name!r} is set aside: {why}", run_id=folder.name)
