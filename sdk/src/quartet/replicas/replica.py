"""One replica as its client sees it: a channel, its health, and what is in flight there.

1. SERVING only while its health stream says so; whoever doubts it (`doubt`) takes it out until it has
   answered again. A server without a health service counts as serving. One that as many watch as may is asked
   every CHECK_SECONDS instead.
2. A replica whose health is unknown is asked again for as long as it is followed, by one call at a time.
3. `refused_until` is set by a replica that is full: until then it is asked only where no other one is there.

States: NEW -> SERVING <-> OUT; NEW -> OUT. NEW has neither answered nor failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import QuartetError, from_rpc
from quartet.inference import INFERENCE
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.context import background
from quartet.kit.own_log import get_logger
from quartet.unreachable import was_not_made
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

# A replica that is well answers its health within milliseconds; a frozen one never does.
ANSWER_SECONDS: Final = 5.0
# Between two health streams; the channel itself paces reconnecting.
AGAIN_SECONDS: Final = 0.25
# Who finds no place to watch is one of hundreds. A call that fails tells sooner (`doubt`).
CHECK_SECONDS: Final = 5.0
# Where no connection can be made the channel says at once why it was not, last time.
WHY_SECONDS: Final = 1.0
# Between two lines of a log about one replica that stays behind.
NOTE_SECONDS: Final = 60.0

log = get_logger()


class State(Enum):
    """Whether a replica is offered."""

    NEW = "new"
    SERVING = "serving"
    OUT = "out"


class Replica:
    """Made on the loop that uses it; ended by `close`."""

    def __init__(self, address: str, security: ClientSecurity, changed: Callable[[], None]) -> None:
        """Begin to follow its health; `changed` is called whenever it may be chosen differently."""
        self.address = address
        self.state = State.NEW
        # Why it is in this state, for a person.
        self.why = ""
        self.since = time.monotonic()
        self.in_flight = 0
        self.refused_until = 0.0
        self.leaving = False
        self._noted = -NOTE_SECONDS
        self._changed = changed
        self._channel = connect(address, security=security)
        make_stub: Any = InferenceServiceStub  # generated code has no annotations
        self.stub = make_stub(self._channel)
        self._watch = background(self._follow(), name=f"health of {address}")

    @property
    def full(self) -> bool:
        """Whether it refused work a moment ago."""
        return self.refused_until > time.monotonic()

    def doubt(self, why: str) -> None:
        """It failed a call: out until its health answers again."""
        if self.state is State.SERVING:
            self._become(State.OUT, f"failed a call: {why}")
            self._watch.cancel()
            # It outlives the RPC, if any, in whose handling the call failed.
            self._watch = background(self._follow(), name=f"health of {self.address}")

    def refused(self, retry_after_ms: int) -> None:
        """It is full for so long."""
        self.refused_until = max(self.refused_until, time.monotonic() + retry_after_ms / 1000)

    def note_held_up(self, why: str) -> None:
        """A call left it, because the weights that it waits for do not come."""
        if time.monotonic() - self._noted > NOTE_SECONDS:
            self._noted = time.monotonic()
            log.warning("replica has old weights, others are asked", address=self.address, why=why)

    @contextlib.contextmanager
    def carrying(self, completions: int) -> Iterator[None]:
        """So many completions are sampled there while inside."""
        self.in_flight += completions
        try:
            yield
        finally:
            self.in_flight -= completions
            if self.leaving:
                self._changed()

    async def close(self) -> None:
        """End the health stream and the channel."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close()

    async def _follow(self) -> None:
        make_stub: Any = health_pb2_grpc.HealthStub
        stub = make_stub(self._channel)
        while True:
            pause_s = AGAIN_SECONDS
            try:
                await self._read(
                    stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE), wait_for_ready=True)
                )
                self._become(State.OUT, "its health stream ended")
            except TimeoutError:
                self._become(State.OUT, "its health does not answer")
                await self._ask_why(stub)
            except grpc.RpcError as error:
                failure = from_rpc(error)
                if failure.reason == "NOT_IMPLEMENTED":  # gRFC A17: without a health service it is healthy
                    self._become(State.SERVING, "it has no health service")
                    return
                if failure.reason == "OVERLOADED":
                    await self._check(stub)
                    pause_s = CHECK_SECONDS
                else:
                    self._become(State.OUT, failure.message)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)

    async def _read(self, call: Any) -> None:
        try:
            # The first answer comes at once or the replica is frozen; later ones come when something changes,
            # and the connection's keepalive notices a peer that has gone.
            patience: float | None = ANSWER_SECONDS
            while True:
                async with asyncio.timeout(patience):
                    answer = await call.read()
                if answer is grpc.aio.EOF:
                    return
                patience = None
                self._hear(answer)
        finally:
            call.cancel()

    async def _check(self, stub: Any) -> None:
        """Its health as of now."""
        try:
            self._hear(
                await stub.Check(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=ANSWER_SECONDS)
            )
        except grpc.RpcError as error:
            self._become(State.OUT, from_rpc(error).message)

    async def _ask_why(self, stub: Any) -> None:
        """The stream waits for a connection, however often none is made: what is in its way."""
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            return
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        try:
            await stub.Check(request, timeout=WHY_SECONDS)
        except grpc.RpcError as error:
            failure = from_rpc(error)
            if was_not_made(failure.message):
                self._become(State.OUT, failure.message)

    def _hear(self, answer: Any) -> None:
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        self._become(State.SERVING if serving else State.OUT, "its health says so")

    def _become(self, state: State, why: str) -> None:
        self.why = why
        if state is not self.state:
            log.info("replica", address=self.address, state=state.value, why=why)
            self.state, self.since = state, time.monotonic()
            self._changed()


def lost(error: QuartetError) -> bool:
    """Whether a failed call casts doubt on its replica: it is away, ending, frozen, or cut off on the way."""
    silent = error.reason == "DEADLINE" and error.metadata.get("waited_for") == "next message"
    # An INTERNAL of the service says so itself; one that only gRPC made is a broken connection.
    cut = error.reason == "INTERNAL" and "grpc_code" in error.metadata
    return error.reason == "NOT_READY" or silent or cut
