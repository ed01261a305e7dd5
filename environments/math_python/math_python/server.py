"""The tool server: one process for all rollouts of an environment worker, one Python session for each
rollout.

A rollout's session is named by its state, which also says whether it is isolated: what a tool server logs is
removed with it, and the worker's log stays. `closer` is where the task says that the rollout is over: a
datagram socket in the abstract namespace, which leaves no file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import uuid

import verifiers.v1 as vf

from math_python.sessions import Limits, Sessions

MAX_NAME_BYTES = 64
CLOSE_SECONDS = 10.0  # of a server that hangs; who looks after it ends that
NOT_ISOLATED = (
    "no namespaces here: Python sessions can reach the network, and read and write whatever the host's user "
    "may; require_isolation = true refuses to run so"
)


class PythonConfig(vf.SharedToolsetConfig):
    """The server's settings."""

    limits: Limits = Limits()
    require_isolation: bool = False


class PythonState(vf.State):
    """What a rollout and its tool know of each other."""

    session: str = ""
    closer: str = ""
    errors: int = 0
    isolated: bool = True


class PythonToolset(vf.Toolset[PythonConfig, PythonState]):
    """Python with a memory."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Start the sessions' parent, and listen for ends."""
        self._sessions = await self._exit_stack.enter_async_context(Sessions(self.config.limits).open())
        if self.config.require_isolation and not self._sessions.isolated:
            raise RuntimeError(NOT_ISOLATED)
        self._closer = f"math-python-{uuid.uuid4().hex}"
        line = self._exit_stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        line.bind(f"\0{self._closer}")
        line.setblocking(False)
        asyncio.get_running_loop().add_reader(line, self._close_named, line)

    def _close_named(self, line: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            self._sessions.end(line.recv(MAX_NAME_BYTES).decode(errors="replace"))

    @vf.tool
    async def python(self, code: str) -> str:
        """Execute Python code in a session that persists across calls.

        Prints are returned, and the value of the last expression.
        """
        if not self.state.session:
            self.state.session, self.state.closer = uuid.uuid4().hex, self._closer
            self.state.isolated = self._sessions.isolated
        answer = await self._sessions.run(self.state.session, code)
        self.state.errors += answer.error
        return answer.output


async def close(state: PythonState) -> None:
    """Tell the server that this rollout is over. A server that is gone has ended its sessions already."""
    if not state.isolated:
        _warn()
    if not state.session:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
        line.setblocking(False)
        line.connect(f"\0{state.closer}")
        # Of a server that is busy the kernel keeps ten, and many rollouts may end at once.
        async with asyncio.timeout(CLOSE_SECONDS):
            await asyncio.get_running_loop().sock_sendall(line, state.session.encode())


@functools.cache
def _warn() -> None:
    """Once in a worker."""
    logging.getLogger(__name__).warning(NOT_ISOLATED)


if __name__ == "__main__":
    PythonToolset.run()
