"""What a trainer has of a run that is deleted, told from what it has of another one of that name.

1. Whose it is says the journal, which is read again where nobody holds it, also in the folder of what was
   taken away: what the run was created with. The trainer compares that with every state that it has, and with
   a run that is open.
2. Of a run of whose calls none was answered there are no states, whatever has its name. Nor of a copy under
   another name, or of a run that somebody else trained: the trainer is not asked.
3. Where nobody can read what it was, everything of its name is taken for its own, unless the trainer has the
   name open: that is somebody's, and is not closed. Where that cannot be read for now (PASSING), it is not
   guessed.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import QuartetError
from quartet.run.name import is_run_id
from quartet.v1 import trainer_service_pb2 as tpb

from quartet_orchestrator import admission, closing
from quartet_orchestrator.book import Book
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.specs import run_spec
from quartet_orchestrator.trainer_client import TrainerClient

#: What keeps a journal that is whole from being read for now. Everything else may be for good.
PASSING = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EIO),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    }
)


@dataclass(frozen=True)
class Claim:
    """What of a name at the trainer is a run's."""

    run_id: str
    #: What it was created with there; None where nobody can read that.
    spec: tpb.RunSpec | None
    #: The last call that was answered; None where nobody can read that.
    applied_seq_id: int | None

    @property
    def has_states(self) -> bool:
        """Whether there may be any of it."""
        return self.applied_seq_id != 0

    async def stock(self, trainer: TrainerClient) -> tpb.DeleteStatesResponse:
        """What there is. Raises QuartetError: RUN_CONFLICT where that is another run's."""
        there = await trainer.delete_states(self.run_id, self.spec, dry_run=True)
        await self._check_open(trainer)
        return there if self.has_states else tpb.DeleteStatesResponse()

    async def _check_open(self, trainer: TrainerClient) -> None:
        try:
            there = await trainer.get(self.run_id)
        except QuartetError as error:
            if error.reason != "RUN_UNKNOWN":
                raise
            return
        if self.spec is None or self.applied_seq_id is None:
            why = "it is open there, and nobody can read here whether it is this run"
        elif closing.is_ahead(there, self.applied_seq_id):
            why = "it was driven further by somebody else, whose states these are"
        else:
            return
        then = "if that is over, or the journal here was cut back, start the trainer anew and delete it again"
        raise QuartetError("RUN_CONFLICT", f"{why}; {then}", run_id=self.run_id)

    async def give_up(self, trainer: TrainerClient) -> None:
        """Closes the run there without saving it, and deletes what it has. Raises QuartetError: RUN_CONFLICT
        where nothing there is of this run."""
        await self.stock(trainer)
        if self.spec is not None:
            await trainer.close_run(self.run_id, 0)
        if self.has_states:
            await trainer.delete_states(self.run_id, self.spec, dry_run=False)


def of(run_id: str, book: Book) -> Claim | None:
    """That of a run with such a book, which lies in its folder; None where a trainer has nothing of it."""
    state = book.state
    if state.run_id != run_id:
        return None
    if not state.applied_seq_id and closing.untold(book) is None:
        return None
    try:
        config = admission.parse(state.config_toml)
    except QuartetError:
        return Claim(run_id, None, state.applied_seq_id)  # this version refuses what an earlier one accepted
    if config.external_trainer:
        return None
    return Claim(run_id, run_spec(config, state.earlier_ends), state.applied_seq_id)


def read(run_id: str, folder: Path) -> Claim | None:
    """The same of a folder that nobody holds, whatever is in it. For a thread. Raises OSError where that
    passes."""
    if not is_run_id(run_id):
        return None
    try:
        book = Book(folder)
    except BlockingIOError:
        raise  # somebody holds it
    except (JournalCorrupt, OSError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        return Claim(run_id, None, None)
    try:
        return of(run_id, book)
    finally:
        book.close()
