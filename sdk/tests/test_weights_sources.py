"""Which relays are asked for a version, and which of them not for a while (quartet.weights.sources)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.weights import sources
from quartet.weights.sources import SHUNNED_SECONDS, STRIKE_SECONDS, Relays


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Moved by hand: `now_s`."""
    hands = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: hands.now_s))
    return hands


async def test_what_a_relay_was_like_is_not_held_against_those_named_meanwhile(
    clock: SimpleNamespace,
) -> None:
    """sources.py 2 and 5: slow is who was asked, and damaged what it sent."""
    announcer: Any = None
    a, b, c = (f"127.0.0.1:{port}" for port in (1, 2, 3))
    slow, damaged = (QuartetError(reason, "so") for reason in ("DEADLINE", "CHECKSUM_MISMATCH"))
    relays = Relays(ClientSecurity())
    route = await relays.route(announcer, [a, b], b"")
    route.channel()
    route.pace.note(sources.SLOW_SECONDS, 1, sign_of_life=False)
    route.go_by([b, a])
    route.failed(a, slow, torn=True)
    assert route.relay == b and route.pace.waited_s == 0.0
    route.channel()
    route.go_by([c])
    route.blame(damaged)
    assert relays.usable([a, b, c]) == [c]
    await relays.close()


async def first_asked(relays: Relays) -> str:
    announcer: Any = None
    return (await relays.route(announcer, ["a:1", "b:1"], b"")).relay


async def test_a_relay_that_failed_its_reader_is_done_without_for_a_while(clock: SimpleNamespace) -> None:
    """sources.py 2"""
    relays = Relays(ClientSecurity())
    assert await first_asked(relays) == "a:1"
    relays.shun("a:1")
    clock.now_s += SHUNNED_SECONDS - 1
    assert await first_asked(relays) == "b:1"
    clock.now_s += 1
    assert await first_asked(relays) == "a:1"


@pytest.mark.parametrize(("waits_s", "is_shunned"), [(14.0, False), (15.0, True)])
async def test_a_relay_that_was_waited_for_in_vain_is_done_without_for_a_while(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, waits_s: float, is_shunned: bool
) -> None:
    """sources.py 2: it would say with every version that it is about to have it. One that is a little behind
    its readers, and passes a version over, would not."""
    monkeypatch.setattr(sources, "BEGIN_SECONDS", (15.0, 30.0))
    monkeypatch.setattr(sources.random, "uniform", lambda first, last: last)
    relays = Relays(ClientSecurity())
    announcer: Any = None
    route = await relays.route(announcer, ["a:1"], b"")
    route.failed("a:1", QuartetError("NOT_READY", "about to be fetched here"), waits_s)
    assert route.relay == "a:1" and relays.usable(["a:1"])
    with pytest.raises(QuartetError, match="neither holds nor fetches"):
        route.failed("a:1", QuartetError("VERSION_UNKNOWN", "neither holds nor fetches it"))
    assert (relays.usable(["a:1"]) == []) is is_shunned


async def test_a_relay_whose_announcer_prepares_is_waited_for_as_long_as_it_said_first(
    clock: SimpleNamespace,
) -> None:
    """sources.py 2: two that wait for each other, and pass on what they once heard, do so no longer."""
    relays = Relays(ClientSecurity())
    announcer: Any = None
    route = await relays.route(announcer, ["a:1"], b"")
    assert route.prepares_s == 0
    for _ in range(10):
        route.failed("a:1", QuartetError("NOT_READY", "is about to", prepares_ms=60_000), 5.0)
        clock.now_s += 5
    assert route.relay == "a:1" and route.prepares_s == 10
    for _ in range(10):
        route.failed("a:1", QuartetError("NOT_READY", "is about to", prepares_ms=60_000), 5.0)
        clock.now_s += 5
    assert route.relay == "" and not relays.usable(["a:1"])


async def test_a_relay_that_gives_up_twice_soon_after_one_another_has_trouble_of_its_own(
    clock: SimpleNamespace,
) -> None:
    """sources.py 3"""
    relays = Relays(ClientSecurity())
    for later_s, again in ((STRIKE_SECONDS - 1, True), (STRIKE_SECONDS, False)):
        assert not relays.strike("a:1")
        clock.now_s += later_s
        await first_asked(relays)
        assert relays.strike("a:1") is again
        clock.now_s += STRIKE_SECONDS
        await first_asked(relays)
