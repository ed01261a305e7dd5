"""The tool servers that all rollouts of a worker share: they live and answer, or their worker is told.

1. One whose process ends is lost at once. It was started with the worker, and only a new worker has another.
2. One that answers nothing for `stall_s`, neither what is asked here every ASK_S nor a rollout's call of a
   tool, hangs, and is lost. A call that takes less is no hang; nor is a queue that a server works off.
3. A time in which this process itself did not run counts as one question at most.
4. One that was there before (a toolset's `url`) is not ours to start anew, and not looked at.

Pinned to verifiers 0.4.0: what a runtime started in the background is private.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from verifiers.v1.runtimes.subprocess import SubprocessRuntime

#: A server is asked so often, and has so long for each answer.
ASK_S: Final = 5.0

# Calls of tools that were answered, by the name of their server.
_answered: Counter[str] = Counter()


def answered(server: str) -> None:
    """A rollout had an answer of this server."""
    _answered[server] += 1


@contextlib.asynccontextmanager
async def looked_after(
    servers: Mapping[str, Any], stall_s: float, lost: Callable[[str], None]
) -> AsyncIterator[None]:
    """Inside, `lost` is called with why when one of them is lost."""
    ours = {name: server for name, server in servers.items() if not server.external}
    watches = [asyncio.create_task(_hangs(name, one.url, stall_s, lost)) for name, one in ours.items()]
    for name, one in ours.items():
        if isinstance(one.runtime, SubprocessRuntime):
            watches += [
                asyncio.create_task(_ends(name, process, lost)) for process in one.runtime._background
            ]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _ends(name: str, process: asyncio.subprocess.Process, lost: Callable[[str], None]) -> None:
    lost(f"{called(name)} {how_it_ended(await process.wait())}")


def how_it_ended(code: int) -> str:
    """ "exited with code 3"."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"exited with code {code}"


async def _hangs(name: str, url: str, stall_s: float, lost: Callable[[str], None]) -> None:
    step_s, silent_s, calls = min(ASK_S, stall_s), 0.0, _answered[name]
    while silent_s < stall_s:
        asked = time.monotonic()
        if await answers(url, step_s) or _answered[name] > calls:
            silent_s = 0.0
        else:
            silent_s += step_s
        calls = _answered[name]
        await asyncio.sleep(max(0.0, asked + step_s - time.monotonic()))
    lost(f"{called(name)} answered nothing for {silent_s:g} s")


def called(name: str) -> str:
    """A server's tools need not be called by its name; it has none then."""
    return f"its tool server {name!r}" if name else "its tool server"


async def answers(url: str, within_s: float) -> bool:
    """Whether its loop turns: it says anything, such as that there is nothing at the place asked for."""
    at = urlsplit(url)
    secure = at.scheme == "https"
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(
                at.hostname, at.port or (443 if secure else 80), ssl=secure or None
            )
            with contextlib.closing(writer):
                question = f"GET / HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(question.encode())
                return (await reader.readline()).startswith(b"HTTP/")
    except (OSError, ValueError):  # also TimeoutError; a line without an end
        return False
