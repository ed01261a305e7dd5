"""The events of one answer, those that came together told together.

1. Events come in order, each once; deltas of one completion that wait together become one, of at most
   MAX_DELTA_TOKENS: while a frame is on its way, the next ones gather.
2. When nothing came for `interval_s`, an empty list says so: the moment for a sign of life.
3. What waits is bounded by the answer itself, whose tokens are bounded by max_tokens.
4. When the stream is left, by whatever way, its source is cancelled and closed before the generator ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from quartet_inference.answering import Ended, Started
from quartet_inference.engine import Delta

#: GenerateDelta says so.
MAX_DELTA_TOKENS = 64

AnswerEvent = Started | Delta | Ended


async def joined(events: AsyncIterator[AnswerEvent], interval_s: float) -> AsyncIterator[list[AnswerEvent]]:
    """What has come since the last time; an empty list where nothing came for `interval_s`."""
    loop = asyncio.get_running_loop()
    waiting: list[AnswerEvent] = []
    came = asyncio.Event()
    failure: Exception | None = None
    ended = False

    async def read() -> None:
        nonlocal failure, ended
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    waiting.append(event)
                    came.set()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever reads the stream
            failure = error
        finally:
            ended = True
            came.set()

    reading = loop.create_task(read())
    try:
        while waiting or not ended:
            if not waiting:
                timer = loop.call_later(interval_s, came.set)
                await came.wait()
                timer.cancel()
                await asyncio.sleep(0)  # what is ready as well comes now, and shares the frame
            came.clear()
            batch = _together(waiting)
            waiting.clear()
            if batch or not ended:
                yield batch
        if failure is not None:
            raise failure
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _together(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """The same events with fewer deltas."""
    told: list[AnswerEvent] = []
    last: dict[int, int] = {}  # completion -> where its last delta is in `told`
    for event in events:
        if isinstance(event, Delta):
            at = last.get(event.index)
            before = told[at] if at is not None else None
            if at is not None and isinstance(before, Delta) and _fit(before, event):
                told[at] = _one(before, event)
                continue
            last[event.index] = len(told)
        told.append(event)
    return told


def _fit(first: Delta, second: Delta) -> bool:
    return len(first.token_ids) + len(second.token_ids) <= MAX_DELTA_TOKENS


def _one(first: Delta, second: Delta) -> Delta:
    spans = list(first.spans)
    for span in second.spans:
        last = spans[-1] if spans else None
        if last is not None and (last.version, last.weights_id) == (span.version, span.weights_id):
            spans[-1] = replace(last, length=last.length + span.length)
        else:
            spans.append(span)
    return Delta(
        first.index,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        spans,
        (*first.tops, *second.tops),
    )
