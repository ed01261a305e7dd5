"""Answers as they are written: one JSON, or a stream of server-sent events.

1. A request that takes longer than its limit ends, and so does the connection of a caller that does not
   read: the writing of one JSON waits for nobody longer than the limit once more, that of a stream no longer
   than the limit and LAST_WORDS_SECONDS.
2. A stream that is idle shows a sign of life. What goes wrong before its first event is an answer with a
   status of its own, what goes wrong later is its last event. A fault's details stay in the log.
3. What a caller has not read holds up its own generation, and no other.
4. Large answers are made into JSON one at a time: that takes several times the bytes that come of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog
from aiohttp import web
from quartet.errors import QuartetError
from quartet.kit.stream import with_heartbeats

from quartet_inference.answering import INLINE_TOKENS, Ended, Started
from quartet_inference.engine import Delta
from quartet_inference.openai.bodies import ChatBody, CompletionBody
from quartet_inference.openai.choices import Choice, Speaker
from quartet_inference.openai.echo import Echoed, Part
from quartet_inference.openai.errors import ANSWER, from_quartet
from quartet_inference.openai.forms import as_sent
from quartet_inference.openai.reply import Reply

#: For the end of a stream: a caller that reads at all takes it at once.
LAST_WORDS_SECONDS = 5.0

#: Of all fronts of a process.
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="large-answers")

log = structlog.get_logger()

#: One of an answer, with the number of its prompt.
Event = tuple[int, Part]


async def numbered(number: int, answer: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
    """The events of one prompt's answer."""
    async with aclosing(answer) as events:  # type: ignore[type-var]
        async for event in events:
            yield number, event


@asynccontextmanager
async def at_most(limit_s: float, waited_for: str = ANSWER) -> AsyncIterator[asyncio.Timeout]:
    """DEADLINE for what takes longer."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield limit
    except TimeoutError:
        why = f"{waited_for} took longer than {limit_s:g} s"
        raise QuartetError("DEADLINE", why, waited_for=waited_for) from None


async def whole(
    http: web.Request,
    body: ChatBody | CompletionBody,
    reply: Reply,
    events: AsyncIterator[Event],
    prompts: int,
    limit_s: float,
) -> web.Response:
    """The answer as one JSON."""
    choices = [Choice() for _ in range(prompts * body.n)]
    given: list[tuple[int, ...]] = [()] * prompts
    async with at_most(limit_s):
        async for number, event in events:
            if isinstance(event, Started):
                given[number] = event.prompt
            elif isinstance(event, Delta):
                choices[number * body.n + event.index].deltas.append(event)
            elif isinstance(event, Echoed):
                reply.echoed[number * body.n + event.index] = event
            else:
                choices[number * body.n + event.index].ended = event

    def write() -> bytes:
        return json.dumps(reply.whole(choices, given)).encode()

    tokens = sum(choice.ended.completion_tokens for choice in choices if choice.ended is not None)
    small = tokens <= INLINE_TOKENS and not _much(body)
    answer = write() if small else await asyncio.get_running_loop().run_in_executor(_WRITER, write)
    response = web.Response(body=answer, content_type="application/json")
    await response.prepare(http)
    await _end(http, response, limit_s)
    return response


async def stream(
    http: web.Request,
    body: ChatBody | CompletionBody,
    reply: Reply,
    events: AsyncIterator[Event],
    limit_s: float,
) -> web.StreamResponse:
    """Server-sent events. What goes wrong before the first is an answer with its own status.

    The limit is for each event's coming and being read: whoever reads what is sampled gets all of it.
    """
    source: AsyncIterator[Event | None] = events
    beating = with_heartbeats(source, lambda: None)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    teller = _Teller(reply, body.n)
    try:
        async with at_most(limit_s) as limit, aclosing(beating):  # type: ignore[type-var]
            async for item in beating:
                if not response.prepared:
                    await response.prepare(http)
                if item is None:
                    await asyncio.shield(response.write(b": alive\n\n"))
                    continue
                limit.reschedule(asyncio.get_running_loop().time() + limit_s)
                if _much(body) or _long(item[1]):
                    told = await asyncio.to_thread(teller.tell, *item)
                else:
                    told = teller.tell(*item)  # at most a delta's tokens: cheaper than the way there
                if told:
                    # Shielded: the limit ends this, and not aiohttp's own waiting for a caller that is slow,
                    # which would be broken off for the last words too.
                    await asyncio.shield(response.write(told))
    except Exception as error:
        if not response.prepared:
            raise
        if isinstance(error, QuartetError):
            why = as_sent(error, body.form_name)
        else:
            log.exception("an answer failed", path=http.path)
            why = QuartetError("INTERNAL", "fault")
        await _last_words(http, response, reply.told(reply.failure(from_quartet(why))))
        return response
    await _last_words(http, response, reply.told(reply.end(teller.ended)) + reply.farewell)
    return response


def _much(body: ChatBody | CompletionBody) -> bool:
    """Whether a piece of the answer takes long to write: a prompt in it, or alternatives of each token."""
    return body.alternatives > 0 or (isinstance(body, CompletionBody) and body.echo)


def _long(event: Part) -> bool:
    """Whether it is the end of a long choice: some dialects tell the whole of it once more."""
    return isinstance(event, Ended) and event.completion_tokens > INLINE_TOKENS


async def _last_words(http: web.Request, response: web.StreamResponse, words: bytes) -> None:
    """End a stream."""
    await _end(http, response, LAST_WORDS_SECONDS, words)


async def _end(http: web.Request, response: web.StreamResponse, limit_s: float, words: bytes = b"") -> None:
    """Whoever does not read the end loses the connection; who has left misses nothing."""
    try:
        async with asyncio.timeout(limit_s):
            if words:
                await response.write(words)
            await response.write_eof()
    except (TimeoutError, ConnectionResetError):
        if http.transport is not None:
            http.transport.abort()


class _Teller:
    """Chunks for events, as they are written."""

    def __init__(self, reply: Reply, n: int) -> None:
        self._reply = reply
        self._n = n
        self._speakers: dict[int, Speaker] = {}
        self._ended: dict[int, Ended] = {}
        self._prompts: dict[int, int] = {}  # tokens, by the number of the prompt
        self._sampled: Counter[int] = Counter()  # tokens, by the index of the choice

    @property
    def ended(self) -> list[Ended]:
        """The ends, in the order of their choices."""
        return [ended for _, ended in sorted(self._ended.items())]

    def tell(self, number: int, event: Part) -> bytes:
        return self._reply.told(self._chunks(number, event))

    def _chunks(self, number: int, event: Part) -> list[dict[str, Any]]:
        first = number * self._n
        if isinstance(event, Started):
            chunks = []
            self._prompts[number] = len(event.prompt)
            for index in range(first, first + self._n):
                self._speakers[index] = self._reply.speaker(event.prompt, event.tools)
                chunks += self._reply.first_chunks(index, event.prompt)
            return self._reply.so_far(chunks, self._prompts[number], 0)
        index = first + event.index
        if isinstance(event, Echoed):
            self._reply.echoed[index] = event
            return []
        speaker = self._speakers[index]
        if isinstance(event, Delta):
            self._sampled[index] += len(event.token_ids)
            chunks = self._reply.delta(index, speaker.feed(event), event)
        else:
            self._ended[index] = event
            chunks = self._reply.last_chunks(index, self._reply.rest(speaker, event), event)
        return self._reply.so_far(chunks, self._prompts[number], self._sampled[index])
