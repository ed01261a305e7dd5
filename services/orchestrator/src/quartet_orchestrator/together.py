"""Work that goes on together: how one of two tasks ends the other, and why a group of them ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def alongside(work: Coroutine[Any, Any, T], background: Coroutine[Any, Any, None]) -> T:
    """The result of the work; the background never ends by itself, and its failure is the work's."""
    main = asyncio.create_task(work)
    beside = asyncio.create_task(background)
    try:
        await asyncio.wait({main, beside}, return_when=asyncio.FIRST_COMPLETED)
        if beside.done():
            beside.result()
        return main.result()
    finally:
        for task in (main, beside):
            task.cancel()
        await asyncio.gather(main, beside, return_exceptions=True)


async def both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Returns once both are done; the failure of one ends the other, and is raised."""
    tasks = [asyncio.create_task(one), asyncio.create_task(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def first_cause(error: BaseException) -> BaseException:
    """The first cause inside what a task group raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
