"""The environment hosts as a run reaches them: which one is asked, and what of their streams is believed."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from orch_world import RUN, until
from quartet.errors import QuartetError, refused
from quartet.kit import context
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer, add_EnvHostServiceServicer_to_server
from quartet_orchestrator import envhosts, outage
from quartet_orchestrator.envhosts import EnvHosts, SignOfLife
from quartet_orchestrator.line import Line
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import MEMBER_ATTEMPTS, Sampling


class Host(EnvHostServiceServicer):
    """Sends what it is told to send; None: nothing more, ever; "beats": nothing but heartbeats, which
    tell why it is held up, if it is, until it is well."""

    def __init__(self, *members):
        self.members = members
        self.asked = 0
        self.described = 0
        self.away = False
        self.loads = False
        self.held_up = ""
        # Members without a place, as its heartbeats say.
        self.queued = 0
        self.left = asyncio.Event()
        self.well = False
        # Whether its rollouts have tokens, so that it has reached inference.
        self.samples = False
        self.is_full = False
        self.most = 1024

    async def DescribeEnvironment(self, request, context):
        self.described += 1
        if self.away:
            raise QuartetError("NOT_READY", "the host drains")
        if self.loads:
            await asyncio.Event().wait()
        info = epb.EnvironmentInfo(id=request.environment.id, max_members=self.most)
        return epb.DescribeEnvironmentResponse(environment=info)

    async def RunRollouts(self, request, context):
        self.asked += 1
        if self.is_full:
            raise QuartetError("OVERLOADED", "it is full", retry_after_ms=10)
        if len(request.members) > self.most:
            raise refused("members", len(request.members), f"ask for at most {self.most}")
        try:
            for member in self.members or request.members:
                if member is None:
                    await asyncio.Event().wait()
                while member == "beats" and not self.well:
                    yield epb.RunRolloutsResponse(
                        heartbeat=Heartbeat(), held_up=self.held_up, queued=self.queued, places=2
                    )
                    await asyncio.sleep(0.02)
                if isinstance(member, float):  # seconds
                    await asyncio.sleep(member)
                    continue
                if member == "beat":
                    yield epb.RunRolloutsResponse(heartbeat=Heartbeat(), places=2)
                    continue
                if member == "proxy":
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests")
                if member == "full":
                    raise QuartetError("OVERLOADED", "it is full", retry_after_ms=10)
                for ended in request.members if member == "beats" else [member]:
                    rollout = rpb.Rollout(member=ended)
                    if self.samples:
                        rollout.samples.add(token_ids=[1])
                    yield epb.RunRolloutsResponse(rollout=rollout)
        finally:
            self.left.set()


@asynccontextmanager
async def hosting(*hosts):
    servers = [
        await start([Service("host", add_EnvHostServiceServicer_to_server, host)], ServerConfig(), Health())
        for host in hosts
    ]
    client = EnvHosts([server.address for server in servers], ClientSecurity())
    try:
        yield client
    finally:
        await client.close()
        for server in servers:
            await server.stop(0)


async def run(client, *members):
    request = epb.RunRolloutsRequest(request_id="r", members=members, timeout_ms=1000)
    return [one.member async for one in client.run(request) if not isinstance(one, SignOfLife)]


@pytest.mark.parametrize(
    ("sent", "reason", "text"),
    [
        ((0,), "NOT_READY", "with 1 rollouts missing"),
        ((0, 0), "INTERNAL", "sent member 0 of r unasked"),
        ((0, 7), "INTERNAL", "sent member 7 of r unasked"),
    ],
)
async def test_each_member_comes_once_or_the_stream_is_an_error(sent, reason, text):
    """envhosts.py 2"""
    async with hosting(Host(*sent)) as client:
        with pytest.raises(QuartetError, match=text) as caught:
            await run(client, 0, 1)
        assert caught.value.reason == reason


async def test_what_a_full_host_has_no_place_for_waits_while_something_is_under_way(monkeypatch):
    """envhosts.py 6: that is no outage, whose patience it would cost."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.02)
    host = Host("beats")
    async with hosting(host) as client:
        under_way = asyncio.create_task(run(client, 0))
        await until(lambda: host.asked == 1)
        host.is_full = True
        waits = asyncio.create_task(run(client, 1, 2))
        await until(lambda: host.asked >= 5)
        assert not waits.done()
        host.is_full, host.well = False, True
        assert (await under_way, await waits) == ([0], [1, 2])
        host.is_full = True
        with pytest.raises(QuartetError, match="it is full"):  # of what others ask of it
            await run(client, 0)


@pytest.mark.parametrize(("sent", "text"), [(("proxy",), "too many requests"), ((0, "full"), "it is full")])
async def test_what_did_not_refuse_all_of_it_as_a_full_host_is_not_asked_again(sent, text):
    """envhosts.py 6: whoever asks again asks for what is missing."""
    host = Host("beats")
    async with hosting(host) as client:
        under_way = asyncio.create_task(run(client, 0))
        await until(lambda: host.asked == 1)
        host.members = sent
        with pytest.raises(QuartetError, match=text) as caught:
            await asyncio.wait_for(run(client, 0, 1), 60)
        assert (caught.value.reason, host.asked) == ("OVERLOADED", 2)
        host.well = True
        assert await under_way == [0]


async def test_a_group_that_is_too_large_for_one_host_is_asked_of_another():
    """envhosts.py 7"""
    small, large = Host(), Host()
    small.most = 2
    environment = epb.EnvironmentRef(id="toy")
    async with hosting(small, large) as client:
        assert await run(client, 0, 1, 2) == [0, 1, 2]
        assert (small.asked, large.asked) == (1, 1)
        assert (await client.describe(environment)).max_members == 0, "which is of the host that is asked"
        large.most = 1
        with pytest.raises(QuartetError, match="members = 3 is refused; ask for at most") as caught:
            await run(client, 0, 1, 2)
        assert (caught.value.reason, small.asked, large.asked) == ("INVALID_REQUEST", 2, 2)
    async with hosting(small) as client:
        assert (await client.describe(environment)).max_members == 2


async def test_a_host_that_falls_silent_is_given_up(monkeypatch):
    """envhosts.py 3 and invariant 7"""
    monkeypatch.setattr(envhosts, "IDLE_TIMEOUT_SECONDS", 0.1)
    host = Host(0, None)
    async with hosting(host) as client:
        with pytest.raises(QuartetError) as caught:
            await run(client, 0, 1)
        assert caught.value.reason == "DEADLINE"
        await asyncio.wait_for(host.left.wait(), 60)


async def test_what_a_host_has_not_ended_when_its_time_is_over_is_a_failure_and_no_absence(monkeypatch):
    """envhosts.py 2 and 3, sampling.py 2: a member is charged, so its group does not start again for ever."""
    monkeypatch.setattr(envhosts, "QUEUE_S", 2.0)
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.02)
    host = Host(0, "beats")
    request = epb.RunRolloutsRequest(request_id="r", timeout_ms=1, members=[0, 1])
    async with hosting(host) as client:
        seen = [rollout async for rollout in client.run(request)]
        ended = [rollout for rollout in seen if not isinstance(rollout, SignOfLife)]
        assert len(ended) < len(seen) and [rollout.member for rollout in ended] == [0, 1]
        assert not ended[0].HasField("failure")
        assert ended[1].failure.kind == rpb.FAILURE_KIND_TIMEOUT and ended[1].failure.retryable
        assert "had not ended it after 2.002 s" in ended[1].failure.message
        monkeypatch.setattr(envhosts, "QUEUE_S", 0.1)
        host.members, host.asked = ("beats",), 0
        away = [outage.Outage(name, 60.0, lambda note, warning=False: None) for name in ("a host", "a model")]
        async with asyncio.timeout(60):
            failed = await Sampling(client, Permits(1), *away).complete(
                epb.RunRolloutsRequest(timeout_ms=1), [1], lambda _: True, all_or_nothing=True
            )
        assert failed[1].kind == rpb.FAILURE_KIND_TIMEOUT and host.asked == MEMBER_ATTEMPTS


async def test_what_waits_for_a_place_has_its_time_for_itself(monkeypatch):
    """envhosts.py 3: for as long as others end at that host; its clock does not run there, either. Nor is a
    heartbeat sent while members of the call itself end."""
    monkeypatch.setattr(envhosts, "QUEUE_S", 1.5)
    host, busy = Host("beats"), Host(0.6, 1, 0.6, 2, 0.6, 3, "beat", 0)
    host.queued = 1
    request = epb.RunRolloutsRequest(request_id="r", timeout_ms=1, members=[0])
    async with hosting(host) as client, hosting(busy) as other, asyncio.timeout(60):

        async def frames():
            return [one async for one in client.run(request)]

        async def ends():
            wanted = epb.RunRolloutsRequest(request_id="s", timeout_ms=1, members=range(4))
            return [one async for one in other.run(wanted) if not isinstance(one, SignOfLife)]

        ending = asyncio.create_task(ends())
        waits = asyncio.create_task(frames())
        await until(lambda: host.asked == 1)
        host.members, until_s = (), time.monotonic() + 4.0
        while time.monotonic() < until_s:
            assert await run(client, 1) == [1] and not waits.done()
            await asyncio.sleep(0.05)
        host.well = True
        *beats, rollout = await waits
        assert not rollout.HasField("failure")
        assert {(one.queued, one.places) for one in beats} == {(1, 2)} and {one.asked for one in beats} >= {1}
        assert [(one.member, one.HasField("failure")) for one in await ending] == [
            (member, False) for member in (1, 2, 3, 0)
        ]
        # And not where nothing does.
        monkeypatch.setattr(envhosts, "QUEUE_S", 0.3)
        host.members, host.well = ("beats",), False
        assert (await frames())[-1].failure.kind == rpb.FAILURE_KIND_TIMEOUT


def test_a_line_that_lasts_is_told_once_with_what_to_raise():
    """line.py 1, 2"""
    notes, now = [], [0.0]
    toy = epb.EnvironmentRef(id="toy")
    line = Line(lambda message, warning=False: notes.append(message), lambda: ["h:1"], clock=lambda: now[0])
    sign = SignOfLife("h:1", queued=3, asked=1024, places=256)

    def goes_on(seconds):
        for _ in range(seconds // 5):
            line.heard(sign, toy)
            line.heard(SignOfLife("h:1"), toy)
            now[0] += 5

    line.heard(SignOfLife("h:1", queued=3), toy)  # it loads the environment
    busy, sign = sign, SignOfLife("h:1", queued=3, asked=256, places=256)
    goes_on(90)
    sign = busy
    assert not notes, "there are places, and they pause between two tries"
    goes_on(60)
    assert not notes and not line.troubles, "groups begin in bursts"
    goes_on(5)
    (told,) = notes
    assert "at h:1: 1024 are asked of it in all, and 256 of one environment can be under way in its" in told
    assert line.troubles == [told]
    now[0] += 15
    assert not line.troubles
    goes_on(90)
    assert line.troubles == notes == [told]


def test_as_many_are_asked_for_as_keep_the_line_short_and_the_places_filled():
    """line.py 3"""
    here, asked = [f"h:{number}" for number in range(1, 7)], []
    line = Line(lambda message, warning=False: None, lambda: here, asked.append)
    toy, other = epb.EnvironmentRef(id="toy"), epb.EnvironmentRef(id="toy", args_json="{}")
    for address, environment in (("h:1", toy), ("h:1", toy), ("h:1", other), ("h:2", toy)):
        line.heard(SignOfLife(address, places=256), environment)
    assert asked == [3072, 3072, 3072, 3584, 3584], "of hosts that have not told as many as by default"
    del here[2:]
    line.heard(SignOfLife("h:2"), toy)  # it loads the environment, or does not tell
    assert asked[-1] == 1536
    here.remove("h:1")
    line.heard(SignOfLife("h:2", places=1024), toy)
    line.heard(SignOfLife("h:2", places=1536), other)
    assert asked[-2:] == [2048, 4096], "a host takes no more by default"
    line.heard(SignOfLife("h:2", places=6000), other)
    here.remove("h:2")
    line.heard(SignOfLife("h:2"), toy)
    assert asked[-2:] == [6000, 1024]


@pytest.mark.parametrize(("more", "limits"), [({}, (1024, 4096)), ({"max_concurrent": 16}, (16, 16))])
async def test_a_run_asks_for_what_the_hosts_have_places_for_where_nobody_said_how_much(world, more, limits):
    """line.py 3"""
    world.host.delay_s = 0.2
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=1, evals=0, **more), dry_run=False)
        await until(lambda: runs._held[RUN].run is not None)
        sampling = runs._held[RUN].run._rollouts._sampling
        before = sampling._permits._limit
        sign = SignOfLife(world.addresses["host"], places=4096)
        sampling._line.heard(sign, epb.EnvironmentRef(id="toy"))
        assert (before, sampling._permits._limit) == limits


async def test_what_an_environment_is_the_next_host_is_asked_where_one_is_away():
    """envhosts.py 1"""
    gone, there = Host(), Host()
    reference = epb.EnvironmentRef(id="toy")
    async with hosting(gone, there) as client:
        gone.away = True
        for _ in range(3):
            assert (await client.describe(reference)).id == "toy"
        assert (gone.described, there.described) == (1, 3), "one that is away rests"
        there.away = True
        with pytest.raises(QuartetError, match=r"host at 127.0.0.1:\d+ is away \(the host drains") as caught:
            await client.describe(reference)
        assert caught.value.reason == "NOT_READY"


async def test_a_host_that_loads_for_too_long_is_told_with_the_time_it_had():
    """Invariant 7: which is the caller's, where that is less than the orchestrator's own."""
    host = Host()
    host.loads = True
    async with hosting(host) as client:
        context.enter(None, 2.0)
        with pytest.raises(QuartetError, match=r"not loaded environment 'toy' after \d+\.\d s") as caught:
            await client.describe(epb.EnvironmentRef(id="toy"))
        assert caught.value.reason == "ENVIRONMENT_UNAVAILABLE"
        told_s = float(caught.value.message.split()[-2])
        assert 1.0 < told_s < 30, "of the hour that it would take by itself"


async def test_the_host_with_the_least_under_way_is_asked_and_one_that_failed_last():
    """envhosts.py 1"""
    busy, torn, idle = Host(None), Host(0), Host()
    async with hosting(busy, torn, idle) as client:
        waiting = asyncio.create_task(run(client, *range(3)))
        while not busy.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(QuartetError, match="missing"):
            await run(client, 0, 1)
        assert torn.asked == 1
        for _ in range(3):
            assert await run(client, 0, 1) == [0, 1]
        assert (busy.asked, torn.asked, idle.asked) == (1, 1, 3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
