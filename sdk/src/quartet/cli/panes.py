"""`quartet panes FOLDER`: the logs of a run's services side by side in a terminal, as long as one likes.

1. Nothing but log files is read: the run neither notices nor waits, and the panes outlive its end.
2. tmux does it, in place of this process; inside of tmux it is a new window.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from quartet.config import ConfigError

DESCRIPTION = """\
Follow the logs of a run's services, a pane for each, by tmux.

  quartet panes outputs/first
"""
#: Lines of each log that were there before.
LINES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("folder", type=Path, help="output folder of `quartet rl`")


def run(options: argparse.Namespace) -> NoReturn:
    """The command. Errors: ConfigError."""
    logs = sorted((options.folder / "logs").glob("*.log"))
    if not logs:
        raise ConfigError(f"{options.folder} has no logs/*.log; name the output folder of a quartet rl")
    tmux = shutil.which("tmux")
    if tmux is None:
        raise ConfigError(f"tmux is not installed; install it, or: tail -F {options.folder}/logs/*.log")
    if not sys.stdout.isatty():
        why = "panes are for a terminal, and there is none"
        raise ConfigError(f"{why}; or: tail -F {options.folder}/logs/*.log")
    os.execv(tmux, [tmux, *window(options.folder, logs, inside="TMUX" in os.environ)])


def window(folder: Path, logs: list[Path], *, inside: bool) -> list[str]:
    """Arguments of tmux: a window with a pane for each log, its name above it."""
    # A dot or a colon would end the session's name.
    name = "quartet-" + re.sub(r"[^\w-]", "-", folder.absolute().name)
    arguments = ["new-window", "-n", name] if inside else ["new-session", "-s", name]
    for number, log in enumerate(logs):
        if number:
            arguments += [";", "split-window"]
        arguments += [f"exec tail -n {LINES} -F {shlex.quote(str(log.absolute()))}"]
        # Tiled after each: a pane that is too small cannot be split.
        arguments += [";", "select-pane", "-T", log.stem, ";", "select-layout", "tiled"]
    return [*arguments, *_titles()]


def _titles() -> Iterator[str]:
    for option, value in (("pane-border-status", "top"), ("pane-border-format", " #{pane_title} ")):
        yield from (";", "set-option", "-w", option, value)
