"""A fine-tuning that somebody ends before it is done, by Ctrl-C, SIGTERM, or by closing its terminal.

1. Asked once, it ends behind the step under way, whose state is saved; while the trainer starts (also anew),
   the model is loading, or the validation set is measured before a step, at once.
2. Asked twice, everything is killed: what was saved stays.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from quartet.cli.asked import Interrupts, listening
from quartet.cli.sft.shown import Display

T = TypeVar("T")


class Stopped(Exception):
    """It was ended after so many steps; None: before it could take one."""

    def __init__(self, done: int | None = None) -> None:
        super().__init__(done)
        self.done = done

    def told(self, output: Path) -> str:
        """In words, with how it goes on."""
        after = "before its first step here" if self.done is None else f"after step {self.done}"
        lines = [f"stopped {after}; go on with: {going_on(output)}"]
        if self.done:
            folder = shlex.quote(str(output))
            lines.append(f"or write the model as it is: quartet export {folder} MODEL_FOLDER")
        return "\n".join(lines)


def going_on(output: Path) -> str:
    """The command that goes on with a folder."""
    return f"quartet sft --output-dir {shlex.quote(str(output))} --resume"


@contextmanager
def heard(display: Display, output: Path) -> Iterator[asyncio.Event]:
    """What is set once somebody asks. On the main thread only."""
    # The services die with this process (quartet.local.tether).
    interrupts = Interrupts(lambda: None, display, f": {going_on(output)}")

    def asked() -> None:
        if not interrupts.asked.is_set():
            display.say("stopping after the step under way; Ctrl-C again kills everything")
        interrupts.signalled()

    with listening(asked, interrupts.asked.set):
        yield interrupts.asked


async def unless(asked: asyncio.Event, work: Coroutine[Any, Any, T], begun: asyncio.Event | None = None) -> T:
    """What the work returns. Raises Stopped where somebody asks before that, or before it has `begun`, and
    what the work raises."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(asked.wait())
    beginning = asyncio.create_task((begun or asyncio.Event()).wait())
    tasks = (working, waiting, beginning)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not (working.done() or beginning.done()):
            raise Stopped
        return await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
