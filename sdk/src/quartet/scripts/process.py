"""The process of a script, and those that it starts: commands of `quartet`.

1. A command dies with the script. What it refuses is a ConfigError, what fails is the script's own error, by
   the words of the command; the script's process is never ended.
2. Each line of a command is said once: by `say`, or by the error that it is part of. What it advises is said
   as what one writes in a script (WORDS).
3. Ctrl-C is handed on, the first as an interrupt and the second as a kill, and raised as KeyboardInterrupt
   once the command has ended.
4. While a command runs, `look` is called in the same thread, LOOK_SECONDS after the last time at the latest,
   with what interrupts the command in order; then it has done what was asked for, and nothing is raised.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from quartet.config.model import ConfigError
from quartet.config.refusals import MAX_TOLD
from quartet.local.ranks import rank_said
from quartet.local.tether import tethered
from quartet.scripts.waiting import LOOK_SECONDS, nothing

ERROR = "error: "
#: Of what a command says, at once.
CHUNK_BYTES = 1 << 16
#: What has no end by then is a line by itself.
MAX_LINE_BYTES = 1 << 20
#: Of a line; a bar of progress begins its own anew.
_ENDS = re.compile(rb"\r?\n|\r(?!\n|$)")
#: Of the lines from the first such on: as many as refusals that are told together have.
MAX_ERROR_LINES = MAX_TOLD + 1
#: What a command advises somebody to write in a shell, and what that is in a script; in this order.
WORDS: Sequence[tuple[str, str]] = (
    (r"quartet \w+ --output-dir ('[^']*'|\S+) --resume\b", "trainer.train(resume_from_checkpoint=True)"),
    (r"quartet export ('[^']*'|\S+) MODEL_FOLDER\b", "trainer.save_model(MODEL_FOLDER)"),
    # A script says the whole of it each time: nothing is taken from the folder.
    (r" \(--resume alone takes it from [^)]*\)", ""),
    (r"add --resume to", "call train(resume_from_checkpoint=True) to"),
    (r"--resume\b", "train(resume_from_checkpoint=True)"),
    (r"--output-dir\b", "args.output_dir"),
)


#: What is done while a command runs; it is given what interrupts that.
Look = Callable[[Callable[[], None]], object]


def run_command(
    command: Sequence[str],
    say: Callable[[str], object],
    failed: Callable[[str], Exception],
    look: Look = nothing,
) -> None:
    """Run a command of `quartet` to its end, and say each of its lines that is none of its error. Raises
    ConfigError, what `failed` makes of a sentence, KeyboardInterrupt."""
    from quartet.cli import exits

    # In a session of its own: Ctrl-C of a terminal is for this process, which hands it on.
    process = subprocess.Popen(
        tethered(list(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = _Output(process.stdout)
    refused: list[str] = []
    interrupted = stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            process.send_signal(signal.SIGINT)

    while True:
        try:
            while output.lines or not output.is_over:
                output.read(LOOK_SECONDS)
                while output.lines:
                    told = in_a_script(output.lines.popleft())
                    is_error = told.startswith(ERROR) or bool(refused)
                    if is_error and len(refused) < MAX_ERROR_LINES:
                        refused.append(told)
                    else:
                        say(told)
                look(stop)
            code = process.wait()
            break
        except KeyboardInterrupt:
            if interrupted:
                process.kill()
            interrupted = True
            stop()
        except BaseException:  # of whoever says its lines, or looks: it is not left behind
            process.kill()
            process.wait()
            raise
    process.stdout.close()
    if interrupted or stopped or not code:
        for line in refused:
            say(line)
    if interrupted:
        raise KeyboardInterrupt
    if stopped and code == exits.INTERRUPTED:
        return
    why = "\n".join(line.removeprefix(ERROR) for line in refused) or f"'quartet' ended with {code}"
    if code == exits.REFUSED:
        raise ConfigError(why)
    if code:
        raise failed(why)


class _Output:
    """What a command says, read without waiting for it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._fd, self._rest = stream.fileno(), b""
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLIN)
        #: Those that are whole, and nobody has taken.
        self.lines: deque[str] = deque()
        self.is_over = False

    def read(self, seconds: float) -> None:
        """Waits so long at most for more of them."""
        if self.is_over or not self._ready.poll(1000 * seconds):
            return
        chunk = os.read(self._fd, CHUNK_BYTES)
        self.is_over = not chunk
        *whole, self._rest = _ENDS.split(self._rest + chunk)
        if len(self._rest) > MAX_LINE_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        if self.is_over and self._rest:
            whole.append(self._rest)
        self.lines.extend(line.decode(errors="replace") for line in whole)


def in_a_script(told: str) -> str:
    """What a command says, in the words of a script."""
    for in_a_shell, here in WORDS:
        told = re.sub(in_a_shell, here, told)
    return told


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """A launcher of ranks starts a script in each: each would start a run of its own. Raises ConfigError."""
    if (said := rank_said(environment)) is not None:
        rank, world = said
        ranks = world if world.isdigit() else 2
        raise ConfigError(
            f"this script runs as rank {rank} of {world} (RANK, WORLD_SIZE), and each rank "
            "would start a run of its own: start it with python, not with accelerate or torchrun, and set "
            f"args.num_processes = {ranks}, the ranks of its trainer (docs/ranks.md)"
        )
