"""torchrun as the key `ranks` starts it: `python -m quartet_trainer.ranks.agent TORCHRUN_ARGUMENT...`.

1. Told to end (SIGTERM, SIGINT), it tells its ranks, which drain as one process does, for as long as that may
   take, and ends as they do: with 0 where all of them did. torchrun by itself kills what takes longer than
   30 s, and ends with 1 and a traceback in any case, which looks like a crash to whoever supervises it.
2. Everything else is torchrun's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.run import main

#: What ends torchrun as it ends by itself.
_ITS_OWN = "SIGHUP,SIGQUIT"


def _pass_on(number: int, _frame: FrameType | None) -> None:
    ranks = _children()
    if not ranks:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for pid in ranks:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended meanwhile


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
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, _pass_on)
    main(["--signals-to-handle", _ITS_OWN, *sys.argv[1:]])
