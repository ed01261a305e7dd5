"""What every process is that tells of a run elsewhere (`python -m MODULE PLAN.json`, or `check`).

Libraries wait, retry, print and end the interpreter as they see fit; here they can, and neither the run nor
its terminal hears of it.

1. A line on stdin is an Ending. The end of stdin ends the process, within the plan's `finish_seconds`: it
   does not outlive who started it by more.
2. Stdout has one JSON object for each thing that happened, {"state": ..., "said": ...}: LOGGING (connected;
   the address of the run), DONE (everything there), FAILED (why). What the library prints goes to stderr.
   No password of an address is told by either.
3. With `check`, nothing is sent: FAILED says why it could not be, DONE that it could.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from quartet.cli.addresses import without_user
from quartet.cli.points import Lines, Point, points
from quartet.kit.standard_streams import say

LOGGING, DONE, FAILED = "logging", "done", "failed"
POLL_SECONDS = 0.5
#: What `check` says where the library is not there.
NO_PACKAGE = "not installed"
#: How a run ended that can be gone on with.
STOPPED_CODE = 255


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be told, and as what: the part that every plan has."""

    folder: str
    #: The run's identity there.
    run_id: str
    #: For what is missing once the run has ended.
    finish_seconds: float = 0.0


@dataclass(frozen=True)
class Ending:
    """How the run ended."""

    exit_code: int
    summary: dict[str, Any]

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self)) + "\n"


UNKNOWN = Ending(STOPPED_CODE, {})


class Told:
    """The words on stdout."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, state: str, said: str = "") -> None:
        with contextlib.suppress(OSError):  # whoever started this was killed
            print(json.dumps({"state": state, "said": said}), file=self._out, flush=True)


class Instructions:
    """What comes on stdin."""

    def __init__(self, stdin: TextIO, finish_seconds: float, told: Told) -> None:
        self.over = threading.Event()
        self.ending = UNKNOWN
        self._stdin = stdin
        self._finish_seconds = finish_seconds
        self._told = told
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stdin:
            self.ending = Ending(**json.loads(line))
        # Whoever started this may be dead, and the library may wait for a server for hours.
        limit = threading.Timer(self._finish_seconds, self._too_late)
        limit.daemon = True
        limit.start()
        self.over.set()

    def _too_late(self) -> None:
        self._told(FAILED, f"it took longer than {self._finish_seconds:.0f} s")
        os._exit(1)

    def followed(self, folder: Path) -> Iterator[list[Point]]:
        """The run's points, those of a look at once, until there will be no more."""
        lines = Lines(folder / "metrics.jsonl")
        while True:
            over = self.over.is_set()  # asked before reading: what was written before is read
            yield list(points(lines))
            if over:
                return
            self.over.wait(POLL_SECONDS)


def serve(
    library: str,
    arguments: list[str],
    check: Callable[..., None],
    report: Callable[[Path, Told], None],
) -> int:
    """The process. `report` is given the plan's file; both raise what the library raises."""
    told = Told(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        if arguments[0] == "check":
            check(*arguments[1:])
        else:
            # First of all, and so last of all: libraries leave their temporary files until then.
            atexit.register(_leave_nothing)
            report(Path(arguments[0]), told)
    except Exception as error:  # noqa: BLE001 - whatever it is, who started this decides
        told(FAILED, _words(error, library))
        say(without_user(traceback.format_exc()), sys.stderr)  # a full disk takes none
        _leave_nothing()
        # At an orderly exit the library would go on with what has failed.
        os._exit(1)
    told(DONE)
    return 0


def _leave_nothing() -> None:
    """Whoever made the folder of temporary files for this process may be dead."""
    with contextlib.suppress(OSError):
        os.rmdir(tempfile.gettempdir())


def _words(error: Exception, library: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        return NO_PACKAGE
    if isinstance(error, PermissionError):
        return str(error)
    return without_user(f"{type(error).__name__}: {error}").splitlines()[0]
