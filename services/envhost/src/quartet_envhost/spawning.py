"""A process of an environment's interpreter, with the arguments and the surroundings that workers have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Final

# What an environment prints goes where the front's logs go.
STDERR: Final = 2
#: The argument of worker.py that makes a template of it (template.py).
TEMPLATE: Final = "--template"


async def spawned(
    python: str, environment: Mapping[str, str], line: int, *arguments: str, more: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    """Start it with its line and `more` descriptors. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        python,
        "-P",  # this folder is no place to import from: a project in it hides its package
        "-m",
        "quartet_envhost.worker",
        f"--fd={line}",
        f"--parent={os.getpid()}",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=STDERR,
        env=environment,
        pass_fds=(line, *more),
        # A group of its own, so that a terminal's Ctrl-C reaches only the front, and kill reaches all of it.
        start_new_session=True,
    )
