"""The folder of a job while one launcher has it, from before its run is accepted.

1. `taken` makes the folder the job's own for as long as the block lasts: another launcher is refused, because
   two orchestrators on one journal would lose rollouts. What `plan` looked at may have changed since, while
   the services were checked: once nobody else can change it, it is looked at again.
2. What --overwrite takes away is gone once the orchestrator has accepted the run that takes its place, and no
   sooner: however an attempt ends before, the folder holds it again (overwritten.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from quartet.cli.held import empty, held, remove
from quartet.cli.job import RECORD, Job, check_free, resumed, was_accepted, write_down
from quartet.cli.overwritten import forget, is_kept, mend, put_back, set_aside
from quartet.config import ConfigError


class Attempt:
    """To have the run of a job accepted, in a folder that is held."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._accepted = job.resumed
        #: Whether the folder holds again what it held before.
        self.put_back = False

    def accepted(self) -> None:
        """The orchestrator has it."""
        job = self._job
        self._accepted = True
        if not job.resumed or job.extended or job.carried_out_otherwise or not was_accepted(job.folder):
            write_down(job, accepted=True)
        forget(job.folder)

    def refused(self) -> None:
        """Nothing was run: the next attempt finds no used folder."""
        if not self._accepted and not self._put_back():
            remove(self._job.folder)

    def ended(self) -> None:
        """Whatever it came to."""
        if not self._accepted:
            self._put_back()

    def _put_back(self) -> bool:
        self.put_back = self.put_back or put_back(self._job.folder)
        return self.put_back


@contextmanager
def taken(job: Job) -> Iterator[Attempt]:
    """The folder, emptied unless the job goes on with it, and locked. Raises ConfigError."""
    refusal = f"output folder {job.folder} belongs to a run that is going on; wait for its end"
    with ExitStack() as opened:
        try:
            opened.enter_context(held(job.folder, f"{refusal}, or name another"))
            attempt = _begin(job)
        except OSError as error:
            # A read-only file system, a full disk: os.access knows neither, least of all for root.
            raise ConfigError(
                f"output folder {job.folder} cannot be written: {error.strerror}; name {job.words.elsewhere}"
            ) from error
        try:
            yield attempt
        finally:
            attempt.ended()


def _begin(job: Job) -> Attempt:
    """Look at the folder again, which is held now; empty it for a new run, and say whose it is."""
    mend(job.folder)
    if job.resumed:
        known = resumed(job.config, job.folder, job.words).run_id
        if known != job.run_id:
            raise ConfigError(f"output folder {job.folder} was given to another run, {known!r}, just now")
        return Attempt(job)
    check_free(job.folder, job.words, overwrite=job.overwrite)
    if was_accepted(job.folder) or is_kept(job.folder, RECORD):
        set_aside(job.folder)
    else:
        empty(job.folder)
    attempt = Attempt(job)
    try:
        write_down(job, accepted=False)
    except OSError:
        attempt.ended()
        raise
    return attempt
