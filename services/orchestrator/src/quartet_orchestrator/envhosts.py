"""The environment hosts as the orchestrator reaches them.

1. A group goes to the host with the least under way; one that failed rests for a moment and is asked last.
   What an environment is, the next host is asked where one is away. Hosts come and go where a name has them
   (peers.py).
2. `run` yields each wanted member exactly once or raises, and SignOfLife between them; a stream that ends
   early, repeats or invents a member is an error.
3. Nothing waits for ever: a stream without any frame for IDLE_TIMEOUT_SECONDS is given up, its host being
   away, and so is one that beats on beyond its time: what that host has not ended are TIMEOUT failures, which
   may be tried again. What waits at a host for a place is not beyond its time while others end there.
4. A host that reaches no replica of inference, as its heartbeats say, is asked last for REST_BLIND_S; after
   LEAVE_BLIND_S what it has under way is asked of another one, where that is not so, too.
5. What a host says that it has loaded is told before the rollouts that it says it of (sameness.py).
6. A host that is full of what was asked of it from here is there: what it has no place for waits, and is
   asked of it again for as long as something is under way at it.
7. A group that is larger than one host takes is asked of another; refused is what none takes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from quartet.errors import QuartetError
from quartet.kit.call import stream, unary
from quartet.kit.channel import ClientSecurity
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.sampled_by import Heard
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure

from quartet_orchestrator.outage import backoff_s
from quartet_orchestrator.peers import Peer, Peers

# Loading an environment may start a worker and its interpreter, fetch data, and be tried again: the host says
# how long that may take (load_timeout_seconds), and this bounds a host that does not.
DESCRIBE_S = 3600.0
# At a host that has it loaded.
DESCRIBE_LOADED_S = 30.0
# How long a host that failed is asked last.
REST_S = 2.0
# Of a host that loads the environment first, or does not tell what waits there, on top of what its rollouts
# may take by themselves.
QUEUE_S = 600.0
# A replica that is started again is back sooner, and rollouts go on from the turn that they were at.
LEAVE_BLIND_S = 30.0
# Three heartbeats and more: whoever asks it again hears with the first whether that is still so.
REST_BLIND_S = 20.0


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """A host is there, and may say why nothing can end, and what waits there."""

    address: str
    held_up: str = ""
    #: Members of this call that have no place there yet; and rollouts that are asked of it, by all runs, and
    #: those of the environment that can be under way at once.
    queued: int = 0
    asked: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a host says that it runs the environment by: a digest of it."""

    address: str
    digest: str


class EnvHosts:
    """Connections to the environment hosts, one at least."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        """Raises ConfigError."""
        self._hosts: Peers[EnvHostServiceStub] = Peers(addresses, security, EnvHostServiceStub)

    async def describe(self, environment: epb.EnvironmentRef) -> epb.EnvironmentInfo:
        """What a host says of the environment once it has loaded it, which may take minutes; `max_members`
        where no other host is known. Raises QuartetError: ENVIRONMENT_UNAVAILABLE where it takes too long."""
        request = epb.DescribeEnvironmentRequest(environment=environment)
        hosts = len(await self._hosts.now())
        for others in reversed(range(hosts)):
            host, began = await self._choose(), time.monotonic()
            try:
                with host.called():
                    response: epb.DescribeEnvironmentResponse = await unary(
                        host.stub.DescribeEnvironment, request, timeout_s=DESCRIBE_S
                    )
            except QuartetError as error:
                if error.reason == "DEADLINE":
                    # Whoever asks the orchestrator may have left it less time than DESCRIBE_S.
                    seconds = time.monotonic() - began
                    what = f"host {host.address} had not loaded environment {environment.id!r}"
                    text = f"{what} after {seconds:.1f} s"
                    raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=environment.id) from error
                host.rests_until = time.monotonic() + REST_S
                if error.reason != "NOT_READY":
                    raise
                if not others:
                    text = f"the environment host at {host.address} is away ({error.message})"
                    raise QuartetError("NOT_READY", text) from error
            else:
                if hosts > 1:
                    response.environment.ClearField("max_members")  # another may take more (7)
                return response.environment
        raise AssertionError("one host at least")

    async def describe_at(self, address: str, environment: epb.EnvironmentRef) -> epb.EnvironmentInfo:
        """What the host at an address says of an environment that it has loaded. Raises QuartetError."""
        host = next((one for one in self._hosts.known if one.address == address), None)
        if host is None:
            raise QuartetError("NOT_READY", f"the environment host at {address} has left")
        request = epb.DescribeEnvironmentRequest(environment=environment)
        with host.called():
            response: epb.DescribeEnvironmentResponse = await unary(
                host.stub.DescribeEnvironment, request, timeout_s=DESCRIBE_LOADED_S
            )
        return response.environment

    async def run(
        self, request: epb.RunRolloutsRequest
    ) -> AsyncGenerator[Rollout | SignOfLife | Loaded, None]:
        """Each member as it ends, well or not; signs of life while nothing ends."""
        too_small: set[Peer[EnvHostServiceStub]] = set()
        is_begun = False
        for tries in itertools.count():
            host = await self._choose(too_small)
            is_busy = host.under_way > 0
            try:
                async with aclosing(self._run_at(host, request)) as frames:
                    async for frame in frames:
                        is_begun |= isinstance(frame, Rollout)
                        yield frame
                return
            except QuartetError as error:
                # Of gRPC itself, or of something in between, it is no answer of the host.
                if is_begun or "grpc_code" in error.metadata:
                    raise
                if error.reason == "INVALID_REQUEST" and error.metadata.get("field") == "members":
                    too_small.add(host)
                    if too_small.issuperset(self._hosts.known):
                        raise
                    continue
                if error.reason != "OVERLOADED" or not is_busy:
                    raise
                await asyncio.sleep(max(backoff_s(tries), (error.retry_after_ms or 0) / 1000))

    async def _run_at(
        self, host: Peer[EnvHostServiceStub], request: epb.RunRolloutsRequest
    ) -> AsyncGenerator[Rollout | SignOfLife | Loaded, None]:
        wanted = set(request.members)
        with host.called():
            host.under_way += len(wanted)
            # Twice what its attempts may take, because a host's rollouts share its workers.
            limit_s = 2 * (request.max_retries + 1) * request.timeout_ms / 1000 + QUEUE_S
            call, since = host.stub.RunRollouts(request), time.monotonic()
            # Another run may have heard that the host reaches inference again, this one not.
            in_doubt = True
            # Whether some of it may wait for a place: until a heartbeat says so, nobody knows.
            is_queued = True
            sampled_by = Heard()
            try:
                async for frame in stream(call, idle_timeout_s=IDLE_TIMEOUT_SECONDS):
                    if frame.WhichOneof("frame") != "rollout":
                        is_queued = bool(frame.queued and frame.places)
                        if is_queued:
                            since = max(since, host.ended_at)
                        if time.monotonic() - since > limit_s:
                            host.rests_until = max(host.rests_until, time.monotonic() + REST_S)
                            for timeout in _timeouts(host.address, limit_s, wanted):
                                yield timeout
                            return
                        line = frame.queued, host.under_way, frame.places
                        yield SignOfLife(host.address, frame.held_up, *line)
                        self._look(host, frame.held_up)
                        in_doubt = bool(frame.held_up)
                        continue
                    if frame.rollout.samples and (in_doubt or host.blind_since is not None):
                        yield SignOfLife(host.address)
                        self._look(host, "")
                        in_doubt = False
                    member = frame.rollout.member
                    if member not in wanted:
                        raise QuartetError(
                            "INTERNAL", f"{host.address} sent member {member} of {request.request_id} unasked"
                        )
                    if frame.environment_digest:
                        yield Loaded(host.address, frame.environment_digest)
                    wanted.discard(member)
                    host.under_way -= 1
                    host.ended_at = time.monotonic()
                    if is_queued:  # and has the place of this one, perhaps
                        since = host.ended_at
                    yield sampled_by.rollout(frame)
                if wanted:
                    raise QuartetError(
                        "NOT_READY", f"{host.address} ended a stream with {len(wanted)} rollouts missing"
                    )
            except QuartetError:
                host.rests_until = max(host.rests_until, time.monotonic() + REST_S)
                raise
            finally:
                host.under_way -= len(wanted)
                call.cancel()

    async def here(self) -> list[Peer[EnvHostServiceStub]]:
        """Every host that there is. Raises NOT_READY while no name has any address."""
        return await self._hosts.now()

    def addresses(self) -> list[str]:
        """Of those that there were when they were looked up last."""
        return [host.address for host in self._hosts.known]

    def _look(self, host: Peer[EnvHostServiceStub], held_up: str) -> None:
        """Remembers whether it reaches inference. Raises QuartetError where another host should be asked."""
        now = time.monotonic()
        if not held_up:
            host.blind_since = None
            return
        if host.blind_since is None:
            host.blind_since = now
        host.rests_until = now + REST_BLIND_S
        others = any(other.blind_since is None for other in self._hosts.known if other is not host)
        if others and now - host.blind_since >= LEAVE_BLIND_S:
            raise QuartetError("NOT_READY", f"{host.address}: {held_up}")

    async def close(self) -> None:
        """Closes every connection; streams under way are cancelled."""
        await self._hosts.close()

    async def _choose(self, last: Collection[Peer[EnvHostServiceStub]] = ()) -> Peer[EnvHostServiceStub]:
        hosts, now = await self._hosts.now(), time.monotonic()
        return min(hosts, key=lambda host: (host in last, host.rests_until > now, host.under_way))


def _timeouts(address: str, limit_s: float, members: Collection[int]) -> list[Rollout]:
    text = f"host {address} had not ended it after {limit_s:g} s"
    failure = RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message=text, retryable=True)
    return [Rollout(member=member, failure=failure) for member in sorted(members)]
