"""The start of a tool server: it answers, or whoever waits for it is told why at once; who is to call it has
its key.

Verifiers looks every second, for three minutes, for the port that a server says, and then as long for its
answer, also where its process has ended. A server says its port before it sets itself up, so most of what
breaks is waited for after that.

1. A wait ends as soon as the process has ended, and says which and how, and what its log says last; Verifiers
   adds more of the log.
2. One that lives has START_S for its port and as much again for its first answer, as Verifiers has it.
3. Servers in containers and elsewhere are waited for as Verifiers does.
4. The URL of one on this machine, which Verifiers hands to harnesses, shows its key (tool_server.py).

Pinned to verifiers 0.4.0: it takes the place of the private `launch._read_back_port`, of its `_PROBE` and its
`_ServedServer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch

from quartet_envhost.v1.folders import LazyFolderRuntime, Started
from quartet_envhost.v1.shared import answers, called, how_it_ended
from quartet_envhost.v1.tool_server import with_key

T = TypeVar("T")

START_S: Final = 180.0
#: A local file, or a port of this machine, is looked at so often.
LOOK_S: Final = 0.05
# Of one that takes the question and says nothing; it is asked again.
ANSWER_S: Final = 2.0
# Of a log's end so much is read, and of its last line so much is told.
MAX_TAIL_BYTES: Final = 4096
MAX_LINE_CHARS: Final = 240

_ServedServer: Final = launch._ServedServer


def end_waits_with_servers() -> None:
    """A server on this machine that ends as it starts is waited for no longer."""
    internals: Any = launch
    wait_for_port = internals._read_back_port

    async def port_of_one_that_answers(runtime: Any, path: str) -> int:
        if not isinstance(runtime, LazyFolderRuntime):
            port: int = await wait_for_port(runtime, path)
            return port
        started = runtime.started[path]
        port = await _unless_it_ends(started, _reported(Path(path)), "say its port")
        await _unless_it_ends(started, _answering(port), "answer")
        runtime.answered |= {f"http://127.0.0.1:{port}/mcp"}  # as the probe is told it
        return port

    internals._read_back_port = port_of_one_that_answers


def hand_out_keys() -> None:
    """Whoever is told where a server on this machine is can call it."""
    internals: Any = launch

    def with_its_key(url: str, runtime: Any) -> Any:
        if isinstance(runtime, LazyFolderRuntime):
            url = with_key(url, runtime.tool_key)
        return _ServedServer(url, runtime)

    internals._ServedServer = with_its_key


async def _unless_it_ends(started: Started, work: Coroutine[Any, Any, T], what: str) -> T:
    """What the work says. Raises ToolsetError where the process ends before, or does not do it in time."""
    working = asyncio.create_task(work)
    ended = asyncio.create_task(started.process.wait())
    try:
        await asyncio.wait([working, ended], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if not ended.done():
            raise ToolsetError(f"{called(started.name)} did not {what} within {START_S:g} s")
        how = f"{called(started.name)} {how_it_ended(ended.result())} as it started"
        last = _last_line(started.log)
        raise ToolsetError(f"{how}: {last}" if last else how)
    finally:
        working.cancel()
        ended.cancel()


async def _reported(file: Path) -> int:
    while True:
        if (port := _port_in(file)) is not None:
            return port
        await asyncio.sleep(LOOK_S)


def _port_in(file: Path) -> int | None:
    # It is there before its text is.
    said = file.read_bytes().strip() if file.exists() else b""
    return int(said) if said.isdigit() else None


async def _answering(port: int) -> None:
    while not await answers(f"http://127.0.0.1:{port}", ANSWER_S):  # noqa: ASYNC110 - another process does
        await asyncio.sleep(LOOK_S)


def _last_line(log: Path) -> str:
    """The last that says anything: of a traceback the error, without the frame that groups of errors have."""
    if not log.exists():  # the server removed the folder that it ran in
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = (line.strip(" |+-") for line in reversed(lines))
    return next((line for line in said if line), "")[:MAX_LINE_CHARS]
