"""torchrun as the key `ranks` starts it: `python -m quartet_trainer.ranks.agent TORCHRUN_ARGUMENT...`.

1. Told to end (SIGTERM, SIGINT), it tells its ranks, which drain as one process does, for as long as that may
   take, and ends as they do: with 0 where all of them did. torchrun by itself kills what takes longer than
   30 s, and ends with 1 and a traceback in any case, which looks like a crash to whoever supervises it.
2. Told so before they serve, it ends by the signal, as they do and as one process does: at once where there
   are none yet, else once there are none any more.
3. Everything else is torchrun's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import structlog
from quartet.kit import logs
from quartet.kit.imports import uncollected

with uncollected():
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

#: What ends torchrun as it ends by itself.
_ITS_OWN = "SIGHUP,SIGQUIT"

log = structlog.get_logger()


def run(arguments: list[str]) -> None:
    """Be torchrun until its ranks have ended."""
    told = set[int]()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        told.add(number)
        ranks = _children()
        if not ranks:
            _end_by(number)
        for pid in ranks:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it has ended meanwhile

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, pass_on)
    try:
        main(["--signals-to-handle", _ITS_OWN, *arguments])
    except ChildFailedError as error:
        # A rank that serves ends with 0. The others lose one that does not yet, and may fail by that.
        ended_by = {-failure.exitcode for failure in error.failures.values()} & told
        if not ended_by:
            raise
        log.info("stopped", before="all ranks served")
        _end_by(ended_by.pop())


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _children() -> list[int]:
    """The processes that this one started, each of which is a rank."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if int(parent) == os.getpid():
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    logs.configure("trainer", others=False)
    run(sys.argv[1:])
