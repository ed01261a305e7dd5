"""The process that tells of a run elsewhere (child.py), as its keeper has it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Protocol

from quartet.cli.elsewhere.child import DONE, FAILED, LOGGING, Ending, Plan
from quartet.cli.outputs import PRIVATE, write_json
from quartet.kit.standard_streams import say
from quartet.v1.orchestrator_service_pb2 import Run

#: Of the time that the end may take, so much without a word.
QUIET_SECONDS = 5.0
#: After which a process that was told to end is killed.
GRACE_SECONDS = 3.0
#: For a look whether a run can be told of; the import alone takes seconds on a loaded machine.
CHECK_SECONDS = 60.0


class Place(Protocol):
    """Where a run can be shown, as its configuration says."""

    @property
    def title(self) -> str:
        """What people call it."""
        ...

    @property
    def name(self) -> str:
        """Of the library, of the package that has the process (child.py), and of a folder in the run's."""
        ...

    @property
    def on(self) -> bool:
        """Whether the configuration asks for it."""
        ...

    def plan(self, folder: Path, run: Run, *, here: bool) -> Plan:
        """How to tell of a run that is recorded in the folder."""
        ...

    def environment(self, folder: Path) -> dict[str, str]:
        """What the process is told beside this one's own, which wins."""
        ...

    def done(self, plan: Plan, where: str) -> str:
        """What a person should know once everything is there."""
        ...


def plan_file(place: Place, folder: Path) -> Path:
    """Where the folder says as what it was told of."""
    return folder / place.name / "quartet.json"


def log_file(place: Place, folder: Path) -> Path:
    """Where the process's library prints."""
    return folder / "logs" / f"{place.name}.log"


def what_check_says(place: Place, *arguments: str, **environment: str) -> tuple[bool, str]:
    """Whether a run can be told of from here, and why not, where that is known; nothing is sent.

    `arguments` are for the module's `check`, `environment` is more of it.
    """
    with tempfile.TemporaryDirectory(prefix=f"quartet-{place.name}-") as scratch:
        try:
            done = subprocess.run(
                [*_command(place), "check", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=_environment(place, Path(scratch), scratch) | environment,
                timeout=CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return True, ""  # no reason to refuse a run
    words = [json.loads(line) for line in done.stdout.splitlines()]
    said = words[-1]["said"] if words and words[-1]["state"] == FAILED else ""
    return done.returncode == 0, said or done.stderr.strip().rpartition("\n")[2]


class Process:
    """Started. Its words are read by a thread, because reading waits."""

    def __init__(self, place: Place, folder: Path, plan: Plan) -> None:
        """Raises OSError where it cannot be."""
        file, log = plan_file(place, folder), log_file(place, folder)
        self._title = place.title
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(plan), PRIVATE)
        log.parent.mkdir(parents=True, exist_ok=True)
        # The library's sockets want short paths, and a killed process leaves its temporary files.
        self._scratch = tempfile.mkdtemp(prefix=f"quartet-{place.name}-")
        try:
            with log.open("ab") as opened:
                self._process = subprocess.Popen(
                    [*_command(place), str(file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=opened,
                    env=_environment(place, folder, self._scratch),
                    process_group=0,  # a Ctrl-C of the terminal is not for it
                )
        except OSError:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        # One for each change of the child's state.
        self._words: deque[dict[str, str]] = deque()
        self.last_words = f"its process ended without a word (logs/{log.name})"
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[bytes]) -> None:
        for line in stdout:
            self._words.append(json.loads(line))

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line.encode())
            self._stdin.flush()

    def reached(self) -> Iterator[str]:
        """Where the run is to be seen, each time that it is known anew."""
        while self._words:
            word = self._words.popleft()
            if word["state"] == LOGGING:
                yield word["said"]
            elif word["state"] != DONE:
                self.last_words = word["said"]

    @property
    def ended(self) -> bool:
        """Whether it is gone, and everything that it said is here."""
        return self._process.poll() is not None and not self._reader.is_alive()

    def end(self, ending: Ending) -> None:
        """Tell it to end."""
        self._tell(ending.line())
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def finish(self, limit_seconds: float) -> bool:
        """It was told to end: wait so long. Whether it did all that it had to."""
        try:
            self._process.wait(QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"waiting for {self._title}, {limit_seconds:.0f} s at most", sys.stderr)
        try:
            self._process.wait(limit_seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(GRACE_SECONDS)
        return self._process.returncode == 0

    def close(self) -> None:
        """End it, and clean up."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _command(place: Place) -> list[str]:
    return [sys.executable, "-P", "-m", f"quartet.cli.{place.name}.child"]


def _environment(place: Place, folder: Path, scratch: str) -> dict[str, str]:
    return {**place.environment(folder), **os.environ, "TMPDIR": scratch}
