"""Client streams of samples: start, batches, commit, assembled whole before anything acts on them.

1. A stream that ends without its commit is STREAM_TORN. A grpc.aio server sees a killed client as a clean end
   of stream, so the commit is the only sign that all has come.
2. A commit whose counts disagree with what arrived is STREAM_TORN.
3. What is held is bounded, per call and over all calls, from the first frame until the work on the batch has
   ended: samples that wait for the worker count, even those of a caller that left.
   In time, too: IDLE_SECONDS between two frames, UPLOAD_SECONDS in all and that of its bytes; what stops or
   trickles is DEADLINE.
4. Who is refused is heard out first, for REFUSED_SECONDS at most: a grpc.aio client that is still writing
   when the refusal comes is told INTERNAL instead (grpc/grpc#36066).
5. The digest covers the start and every sample with its length, not how they were cut into messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import xxhash
from quartet import experts, trainable
from quartet.errors import QuartetError

from quartet_trainer.sample import Sample
from quartet_trainer.wire import training_sample

StartT = TypeVar("StartT")
T = TypeVar("T")

#: Bytes of samples of one call, as serialised, without their experts (experts.MAX_CALL_BYTES). A run that
#: comes to it does not go on: answers grow as it learns, and its batch_size stays.
MAX_CALL_BYTES = trainable.MAX_CALL_BYTES
#: The same over all calls under way: the largest two. Arrays in memory are about five times the serialised
#: size, so that is 10 GB of the host's.
MAX_BUFFERED_BYTES = 2 * MAX_CALL_BYTES
#: Of experts over all calls under way; in memory they are as large as on the wire.
MAX_BUFFERED_EXPERTS_BYTES = 2 * experts.MAX_CALL_BYTES
#: Between two frames; a client that sends none for so long is frozen or gone.
IDLE_SECONDS = 30.0
#: From the first frame to the end, beside what the bytes that came take at a network's slowest.
UPLOAD_SECONDS = 300.0
UPLOAD_BYTES_PER_SECOND = 1_000_000
#: For the rest of what is refused already, of which nothing is kept.
REFUSED_SECONDS = 5.0


@dataclass(slots=True)
class Batch(Generic[StartT]):
    """A committed stream."""

    start: StartT
    samples: Sequence[Sample]
    digest: bytes
    #: Whether its caller has left: nobody hears what comes of it.
    left: bool = False


#: What is done with one.
Work = Callable[[Batch[Any]], Coroutine[Any, Any, T]]


@dataclass(slots=True)
class _Held:
    """Bytes that one call holds of the common bound."""

    size: int = 0
    experts: int = 0


class Intake:
    """Collects client streams within one bound."""

    def __init__(self) -> None:
        self._buffered = _Held()
        # The event loop itself refers to tasks only weakly.
        self._working: set[asyncio.Task[Any]] = set()

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Of samples as serialised, and of their experts, of all calls under way."""
        return self._buffered.size, self._buffered.experts

    async def use(self, frames: AsyncIterator[Any], begin: Callable[[Any], Work[T]]) -> T:
        """Read one stream to its end and work on it; when its caller leaves, the work goes on and can tell.

        `begin` says by the start what the work is, or refuses it before anything that follows is kept.
        Errors: STREAM_TORN, INVALID_REQUEST, OVERLOADED, DEADLINE, and those of `begin` and of the work.
        """
        held = _Held()
        try:
            async with aclosing(_in_time(frames, held)) as timely:
                try:
                    start = _start(await anext(timely, None))
                    work = begin(start)
                    batch = await self._collect(start, timely, held)
                except QuartetError as error:
                    refusal = error.with_traceback(None)  # whose frames hold the samples
                    self._release(held)
                    await _heard_out(timely)
                    raise refusal from None
        except BaseException:
            self._release(held)
            raise
        task = asyncio.create_task(self._work(work(batch), held))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            batch.left = True
            raise

    async def _work(self, work: Coroutine[Any, Any, T], held: _Held) -> T:
        # Not when the task is seen to be done: nobody must know the result while its samples still count.
        try:
            return await work
        finally:
            self._release(held)

    def _release(self, held: _Held) -> None:
        self._buffered.size -= held.size
        self._buffered.experts -= held.experts
        held.size = held.experts = 0

    async def _collect(self, start: Any, frames: AsyncIterator[Any], held: _Held) -> Batch[Any]:
        digest = xxhash.xxh3_128(start.SerializeToString(deterministic=True))
        samples: list[Sample] = []
        commit = None
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            if commit is not None or kind not in ("batch", "commit"):
                raise _order(f"a frame {kind!r} after {'the commit' if commit else 'the start'}")
            if kind == "commit":
                commit = frame.commit
                continue
            for sample in frame.batch.samples:
                serialised = sample.SerializeToString(deterministic=True)
                self._admit(len(serialised), len(sample.sample.experts.numbers), held)
                # Of messages in a row only their lengths tell where one ends: two are not the merge of both.
                digest.update(len(serialised).to_bytes(8, "big"))
                digest.update(serialised)
                samples.append(training_sample(len(samples), sample))
        if commit is None:
            raise _torn(f"the stream ended after {len(samples)} samples without its commit")
        _agree("sample_count", commit.sample_count, len(samples))
        _agree("token_count", commit.token_count, sum(len(sample.tokens_T) for sample in samples))
        return Batch(start, samples, bytes(digest.digest()))

    def _admit(self, size: int, of_experts: int, held: _Held) -> None:
        for one in (held, self._buffered):
            one.size += size - of_experts
            one.experts += of_experts
        for what, value, limit in (
            ("bytes of samples", held.size, MAX_CALL_BYTES),
            ("bytes of experts", held.experts, experts.MAX_CALL_BYTES),
        ):
            if value > limit:
                raise QuartetError(
                    "INVALID_REQUEST",
                    f"a call carries at most {limit} {what}; split the batch",
                    field="batch",
                    value=value,
                    remedy="split the batch; gradients accumulate until OptimStep",
                )
        for what, value, limit in (
            ("samples", self._buffered.size, MAX_BUFFERED_BYTES),
            ("experts", self._buffered.experts, MAX_BUFFERED_EXPERTS_BYTES),
        ):
            if value > limit:
                raise QuartetError("OVERLOADED", f"calls under way hold {limit} bytes of {what} already")


async def _in_time(frames: AsyncIterator[Any], held: _Held) -> AsyncGenerator[Any, None]:
    """The frames, each within its time. Errors: DEADLINE."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        idle = loop.time() + IDLE_SECONDS
        allowed_s = UPLOAD_SECONDS + (held.size + held.experts) / UPLOAD_BYTES_PER_SECOND
        end = began + allowed_s
        try:
            async with asyncio.timeout_at(min(idle, end)):
                frame = await anext(frames, None)
        except TimeoutError:
            if idle < end:
                raise _late(f"no frame came for {IDLE_SECONDS:g} s", "frame") from None
            raise _late(f"the upload took longer than {allowed_s:.0f} s", "commit") from None
        if frame is None:
            return
        yield frame


async def _heard_out(frames: AsyncIterator[Any]) -> None:
    with suppress(TimeoutError, QuartetError):
        async with asyncio.timeout(REFUSED_SECONDS):
            async for _ in frames:
                pass


def _start(frame: Any | None) -> Any:
    if frame is None:
        raise _torn("the stream ended before its start")
    if frame.WhichOneof("frame") != "start":
        raise _order(f"the first frame is {frame.WhichOneof('frame')!r}, not the start")
    return frame.start


def _agree(what: str, committed: int, arrived: int) -> None:
    if committed != arrived:
        raise _torn(f"the commit says {what} {committed}, {arrived} arrived")


def _torn(what: str) -> QuartetError:
    return QuartetError("STREAM_TORN", f"{what}; nothing was applied, send it again")


def _late(what: str, waited_for: str) -> QuartetError:
    return QuartetError("DEADLINE", f"{what}; nothing was applied, send it again", waited_for=waited_for)


def _order(what: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"{what}; send start, batches, commit",
        field="frame",
        remedy="send start, batches, commit",
    )
