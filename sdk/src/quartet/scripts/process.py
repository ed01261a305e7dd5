"""The process of a script, and those that it starts: commands of `quartet`.

1. A command dies with the script. What it refuses is a ConfigError, what fails is the script's own error, by
   the words of the command; the script's process is never ended.
2. Each line of a command is said once: by `say`, or by the error that it is part of. What it advises is said
   as what one writes in a script (WORDS).
3. Ctrl-C is handed on, the first as an interrupt and the second as a kill, and raised as KeyboardInterrupt
   once the command has ended.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from quartet.config.model import ConfigError
from quartet.config.refusals import MAX_TOLD
from quartet.local.ranks import rank_said
from quartet.local.tether import tethered

ERROR = "error: "
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


def run_command(
    command: Sequence[str], say: Callable[[str], object], failed: Callable[[str], Exception]
) -> None:
    """Run a command of `quartet` to its end, and say each of its lines that is none of its error. Raises
    ConfigError, what `failed` makes of a sentence, KeyboardInterrupt."""
    from quartet.cli import exits

    # In a session of its own: Ctrl-C of a terminal is for this process, which hands it on.
    process = subprocess.Popen(
        tethered(list(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    refused: list[str] = []
    interrupted = False
    while True:
        try:
            for line in process.stdout:
                told = in_a_script(line.rstrip("\n"))
                is_error = told.startswith(ERROR) or bool(refused)
                if is_error and len(refused) < MAX_ERROR_LINES:
                    refused.append(told)
                else:
                    say(told)
            code = process.wait()
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
            interrupted = True
    process.stdout.close()
    if interrupted or not code:
        for line in refused:
            say(line)
    if interrupted:
        raise KeyboardInterrupt
    why = "\n".join(line.removeprefix(ERROR) for line in refused) or f"'quartet' ended with {code}"
    if code == exits.REFUSED:
        raise ConfigError(why)
    if code:
        raise failed(why)


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
