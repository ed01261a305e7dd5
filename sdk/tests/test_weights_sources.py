"""Which relays are asked for a version, and which of them not for a while (quartet.weights.sources)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quartet.kit.channel import ClientSecurity
from quartet.weights import sources
from quartet.weights.sources import SHUNNED_SECONDS, STRIKE_SECONDS, Relays


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Moved by hand: `now_s`."""
    hands = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: hands.now_s))
    return hands


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
