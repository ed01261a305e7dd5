"""What goes on without its caller is no fault of the process (kit/shielded.py)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit.shielded import shielded
from structlog.testing import capture_logs


@pytest.mark.parametrize(
    ("error", "level"),
    [(QuartetError("OVERLOADED", "full"), "info"), (ValueError("bug"), "error"), (None, "")],
)
async def test_a_failure_that_nobody_waits_for_is_in_the_log_once(error: Any, level: str) -> None:
    """Not as a task of asyncio whose exception was never retrieved."""
    asyncios: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: asyncios.append(context))
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        if error is not None:
            raise error

    begun = asyncio.create_task(work())
    caller = asyncio.create_task(shielded(begun))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled() and not begun.done()
    with capture_logs() as logs:
        go_on.set()
        await asyncio.wait({begun})
        await asyncio.sleep(0)
    del begun
    gc.collect()
    assert [one["log_level"] for one in logs] == [level] * (error is not None)
    assert asyncios == []


async def test_whoever_waits_is_told_and_holds_nothing_of_the_work() -> None:
    """A version is as large as its model: it goes when its refusal is told, not with some collection."""

    class Version: ...

    async def work(version: Version) -> None:
        raise QuartetError("OVERLOADED", "full")

    version = Version()
    held = weakref.ref(version)
    with capture_logs() as logs, pytest.raises(QuartetError, match="full"):
        await shielded(asyncio.create_task(work(version)))
    del version
    assert held() is None and logs == []
