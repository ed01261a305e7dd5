"""Environment hosts that have lost their way to inference: a person is told, and others are asked."""

from __future__ import annotations

import asyncio
import time

from quartet.v1 import envhost_service_pb2 as epb
from quartet_orchestrator import envhosts
from quartet_orchestrator.envhosts import SignOfLife
from quartet_orchestrator.reach import NOTE_AFTER_S, Reach
from test_orch_envhosts import Host, hosting, run

WHY = "no replica of inference is in service (r1: its health does not answer)"


def test_one_note_of_each_host_and_one_when_it_reaches_inference_again():
    """reach.py 1, trouble.py 1"""
    notes, now = [], [0.0]

    def note(message, *, warning=False):
        notes.append((message, warning))

    heard = Reach(note, lambda: ["h1", "h2"], lambda: now[0]).heard
    heard("h1", WHY)
    heard("h2", "")
    now[0] = NOTE_AFTER_S - 1
    heard("h1", WHY)
    heard("h2", WHY)
    assert not notes
    for now[0] in (NOTE_AFTER_S, NOTE_AFTER_S + 5):
        heard("h1", WHY)
    heard("h2", "")  # too short for a note, of its end as well
    now[0] = 60.0
    heard("h1", "")
    heard("h1", WHY)
    assert notes == [
        (f"the environment host at h1: {WHY}", True),
        ("the environment host at h1 reaches inference again after 60 s", False),
    ]


def test_a_host_that_has_left_is_no_trouble_any_longer():
    """reach.py 2: its pod is another one now, of which nothing is known."""
    here = ["h1", "h2"]
    reach = Reach(lambda message, *, warning=False: None, lambda: here)
    for address in here:
        reach.heard(address, WHY)
    assert reach.troubles == [f"the environment host at {address}: {WHY}" for address in here]
    here[:] = ["h2", "h3"]
    assert reach.troubles == [f"the environment host at h2: {WHY}"]
    here.append("h1")
    assert len(reach.troubles) == 1, "what it said before is long ago"


async def test_what_a_blind_host_has_under_way_is_asked_of_one_that_is_not(monkeypatch):
    """envhosts.py 4: and it is asked last from then on, until that is over."""
    monkeypatch.setattr(envhosts, "LEAVE_BLIND_S", 0.2)
    monkeypatch.setattr(envhosts, "REST_S", 0.0)
    monkeypatch.setattr(envhosts, "REST_BLIND_S", 30.0)
    blind, well = Host("beats"), Host()
    blind.held_up = WHY
    async with hosting(blind, well) as client:
        began = time.monotonic()
        left = await asyncio.gather(run(client, 0, 1), run(client, 2, 3), return_exceptions=True)
        assert time.monotonic() - began >= 0.2
        assert sorted(map(str, left))[1] == "[2, 3]" and WHY in str(left[0])
        assert [await run(client, 0) for _ in range(3)] == [[0]] * 3 and (blind.asked, well.asked) == (1, 4)
        for host in client._hosts.known:  # as if that time had passed: it is tried again
            host.rests_until -= 30.0
        blind.members = ()
        await asyncio.gather(run(client, 0), run(client, 0))
        assert (blind.asked, well.asked) == (2, 5)


async def test_where_all_are_blind_their_rollouts_wait(monkeypatch):
    """envhosts.py 4: that is inference's outage, after which they go on."""
    monkeypatch.setattr(envhosts, "LEAVE_BLIND_S", 0.05)
    hosts = Host("beats"), Host("beats")
    for host in hosts:
        host.held_up = WHY
    async with hosting(*hosts) as client:
        calls = [asyncio.create_task(run(client, 0)) for _ in hosts]
        await asyncio.sleep(0.5)
        assert [host.asked for host in hosts] == [1, 1] and not any(call.done() for call in calls)
        for host in hosts:
            host.well = True
        assert await asyncio.gather(*calls) == [[0], [0]]


async def test_every_run_hears_that_a_host_reaches_inference_again():
    """reach.py 1: not only the one whose rollout came first."""
    host = Host("beats")
    host.held_up, host.samples = WHY, True

    async def hears(reach, member):
        request = epb.RunRolloutsRequest(request_id="r", members=[member], timeout_ms=1000)
        async for one in client.run(request):
            if isinstance(one, SignOfLife):
                reach.heard(one.address, one.held_up)

    async with hosting(host) as client:
        runs = [Reach(lambda message, *, warning=False: None, client.addresses) for _ in range(3)]
        under_way = [asyncio.create_task(hears(reach, 0)) for reach in runs]
        async with asyncio.timeout(60):
            while not all(reach.troubles for reach in runs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # What the third one has under way ends without a token; its next rollout has some.
        under_way.pop().cancel()
        host.well = True
        await asyncio.gather(*under_way)
        assert [len(reach.troubles) for reach in runs] == [0, 0, 1]
        await hears(runs[2], 0)
        assert not runs[2].troubles
