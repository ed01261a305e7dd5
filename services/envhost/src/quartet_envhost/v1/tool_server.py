"""A tool server on this machine, started at the pace of a worker: `python -m quartet_envhost.v1.tool_server
MODULE` is `python -m MODULE`, which Verifiers would have started.

Importing Verifiers is nearly all that it does before it answers, and a rollout waits for servers of its own.
With Anthropic's package deferred (deferred.py), and garbage looked for as seldom as in a worker (garbage.py),
that takes half the CPU time.

1. The module runs as by that command, and nothing is imported before it but for what is deferred, and what a
   key asks for.
2. Verifiers serves the tools on loopback, where every user of the machine can call, to whoever does. With a
   key a request is answered that shows it in its URL, and refused (403) otherwise.
3. The key is told in the server's environment, which its own user alone can read, and what the server starts
   does not inherit it.

Pinned to verifiers 0.4.0, which serves tools as this application of its MCP server.
"""

from __future__ import annotations

import hmac
import os
import runpy
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from quartet_envhost.garbage import look_seldom

#: Where a server is told its key, and what a URL shows it as.
KEY_VARIABLE: Final = "QUARTET_TOOL_KEY"
_SHOWN_AS: Final = "quartet_key"


def soon(command: Sequence[str]) -> list[str]:
    """The command that starts the same server sooner; the same, where it is another than Verifiers'."""
    match list(command):
        case [sys.executable, "-m", module, *arguments]:
            return [sys.executable, "-m", __name__, module, *arguments]
        case other:
            return other


def with_key(url: str, key: str) -> str:
    """The URL that a server with that key answers at."""
    return f"{url}?{_SHOWN_AS}={key}"


def main() -> None:
    """Be the server that the arguments name."""
    look_seldom()
    if key := os.environ.pop(KEY_VARIABLE, ""):
        _ask_for(key)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _ask_for(key: str) -> None:
    """Tools are served here to who shows the key."""
    from mcp.server.mcpserver import MCPServer  # type: ignore[import-not-found]

    made = MCPServer.streamable_http_app
    pair = f"{_SHOWN_AS}={key}".encode()

    def with_a_door(self: Any, **settings: Any) -> Callable[..., Awaitable[None]]:
        served = made(self, **settings)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or any(
                hmac.compare_digest(shown, pair) for shown in scope["query_string"].split(b"&")
            ):
                await served(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 403})
            await send({"type": "http.response.body"})

        return application

    MCPServer.streamable_http_app = with_a_door


if __name__ == "__main__":
    main()
