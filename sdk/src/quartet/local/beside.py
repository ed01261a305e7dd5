"""Work that needs services of this machine: they live exactly as long as it.

1. The work begins once every service listens; however it ends, the services are ended too.
2. A service that cannot be kept alive ends the work with ServiceFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from quartet.local.child import ChildSpec
from quartet.local.supervisor import Supervisor
from quartet.local.wiring import service_of

T = TypeVar("T")

#: The addresses of each service's processes.
AddressBook = Mapping[str, Sequence[str]]


async def beside(
    specs: Sequence[ChildSpec], work: Callable[[AddressBook], Coroutine[Any, Any, T]], *, drain_s: float
) -> T:
    """What `work` returns. Raises ServiceFailed, and what `work` raises."""
    supervisor = Supervisor(specs)
    supervisor.start()
    tasks: list[asyncio.Task[Any]] = []
    try:
        await supervisor.wait_bound()
        book: dict[str, list[str]] = {}
        for status in supervisor.statuses:
            book.setdefault(service_of(status.name), []).append(status.address)
        working = asyncio.create_task(work(book))
        failed = asyncio.create_task(supervisor.wait_failed())
        tasks = [working, failed]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            failed.result()
        return await working
    finally:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also where the work is cancelled once more while it ends
            await supervisor.stop(drain_s)
