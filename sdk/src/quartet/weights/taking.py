"""A stream for a reader that may stop reading without leaving.

1. What the stream holds is held no longer than TAKEN_SECONDS after its reader took the last message, though
   the call, and one message of it, are there until the reader reads on or is gone.
2. Who reads on after that is told so, and may begin again where it stopped.
3. However slow, who takes a message within TAKEN_SECONDS of the one before gets them all.

For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from quartet.errors import QuartetError

#: To take a chunk of 1 MiB: by whoever reads 17 kB/s, which no network does that weights should cross.
TAKEN_SECONDS = 60.0


#: A method that answers a request by messages, which it holds something for.
Sending = Callable[[Any, Any], AsyncGenerator[bytes, None]]


def while_taken(method: Sending) -> Sending:
    """The method, whose messages end where they are not taken. Errors: DEADLINE."""

    async def sending(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        messages = method(request, context)
        closing: asyncio.Task[None] | None = None

        def give_up() -> None:
            # Nobody runs them now: they wait to be asked for the next message.
            nonlocal closing
            closing = loop.create_task(messages.aclose())

        try:
            async for message in messages:
                patience = loop.call_later(TAKEN_SECONDS, give_up)
                try:
                    yield message
                finally:
                    patience.cancel()
                if closing is not None:
                    raise QuartetError(
                        "DEADLINE",
                        f"the reader took nothing for {TAKEN_SECONDS:g} s; fetch again from the first byte "
                        "that is missing",
                        waited_for="reader",
                    )
        finally:
            await (messages.aclose() if closing is None else closing)

    return sending
