"""The requests in the decoding thread of the embedded engine: what each is told, and how."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quartet_inference.embedded.batch import Batch
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.requests import Requests
from quartet_inference.embedded.tickets import Ticket
from quartet_inference.engine import Delta, Request, Sampling


async def test_the_events_of_a_step_come_in_order_with_one_wake_up_of_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """requests.py 3."""
    loop, wakes = asyncio.get_running_loop(), list[Any]()
    plain = loop.call_soon_threadsafe

    def noted(callback: Any, *given: Any) -> Any:
        wakes.append(callback)
        return plain(callback, *given)

    requests = Requests(cast(Batch, SimpleNamespace(rows=[])), Commands(1))
    tickets = [Ticket(Request((1,), Sampling(max_tokens=3)), loop) for _ in range(2)]
    events = [Delta(0, [token], [0.0], []) for token in range(3)]
    for event in events:
        for ticket in tickets:
            requests.send(ticket, event)
    monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
    requests.deliver()
    requests.deliver()
    assert len(wakes) == 1, "and none for nothing"
    for ticket in tickets:
        assert [await asyncio.wait_for(ticket.events.get(), 30) for _ in events] == events
