"""The process that talks to Weights & Biases (child.py), as its keeper has it."""

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
from pathlib import Path
from typing import IO, Any

from quartet.cli.wandb.child import DONE, LOGGING, Ending

CHILD = [sys.executable, "-P", "-m", "quartet.cli.wandb.child"]
#: Where the folder says as what it was reported.
PLAN = "wandb/quartet.json"
LOG = "logs/wandb.log"
#: Of the time that the end may take, so much without a word.
QUIET_SECONDS = 5.0
#: After which a process that was told to end is killed.
GRACE_SECONDS = 3.0


class Process:
    """Started. Its words are read by a thread, because reading waits."""

    def __init__(self, folder: Path) -> None:
        (folder / LOG).parent.mkdir(parents=True, exist_ok=True)
        # The library's sockets want short paths, and a killed process leaves its temporary files.
        self._scratch = tempfile.mkdtemp(prefix="quartet-wandb-")
        try:
            with (folder / LOG).open("ab") as log:
                self._process = subprocess.Popen(
                    [*CHILD, str(folder / PLAN)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment_of(folder, self._scratch),
                    process_group=0,  # a Ctrl-C of the terminal is not for it
                )
        except OSError:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        # One for each change of the child's state.
        self._words: deque[dict[str, str]] = deque()
        self._done = False
        self.last_words = "its process ended without a word (logs/wandb.log)"
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
            elif word["state"] == DONE:
                self._done = True
            else:
                self.last_words = word["said"]

    @property
    def ended(self) -> bool:
        """Whether it is gone, and everything that it said is here."""
        return self._process.poll() is not None and not self._reader.is_alive()

    def finish(self, ending: Ending, limit_seconds: float) -> bool:
        """Tell it to end, and wait so long. Whether it did all that it had to."""
        self._tell(ending.line())
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"waiting for Weights & Biases, {limit_seconds:.0f} s at most", file=sys.stderr, flush=True)
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


def environment_of(folder: Path, scratch: str) -> dict[str, Any]:
    """The child's: what the library would put into the home folder goes into the run's."""
    beside = str(folder / "wandb")
    defaults = {name: beside for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")}
    return {**defaults, **os.environ, "TMPDIR": scratch}
