"""Faults of ours in a follower: it ends, and with it the service; it does not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quartet_inference import updates


async def test_a_follower_whose_watch_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """replication.py 2: old weights would be served for ever, by a replica that looks healthy."""

    async def faulty(*_: Any) -> AsyncIterator[Any]:
        raise RuntimeError("a fault of ours")
        yield

    monkeypatch.setattr(updates, "watch", faulty)
    unused: Any = None
    publisher = updates.Publisher(unused, "r", unused)
    follower = updates.Follower(unused, publisher, unused, unused, lambda why: None)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await asyncio.wait_for(follower.run(), 30)
