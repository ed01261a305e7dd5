"""Work that goes on to its end although whoever waits for it leaves.

What it raises is told to whoever waits. Where nobody does any more the log says it, a refusal in a line, a
fault with its traceback; asyncio would log either as an exception that was never retrieved.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from quartet.errors import QuartetError
from quartet.kit.own_log import get_logger

T = TypeVar("T")

log = get_logger()


async def shielded(work: asyncio.Task[T]) -> T:
    """Its result. Errors: those of the work."""
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        work.add_done_callback(_without_caller)
        raise
    try:
        return work.result()
    finally:
        del work  # in the traceback of its own exception it would hold on to all that it worked on


def _without_caller(work: asyncio.Task[Any]) -> None:
    error = None if work.cancelled() else work.exception()
    if isinstance(error, QuartetError):
        log.info("refused, and nobody waits for it", why=str(error))
    elif error is not None:
        log.error("failed, and nobody waits for it", exc_info=error)
