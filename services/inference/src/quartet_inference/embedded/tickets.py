"""Requests as the engine keeps them: where their events go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from quartet.errors import QuartetError

from quartet_inference.embedded.lora import Slot
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Event, Request
from quartet_inference.stop_strings import watch
from quartet_inference.text_stream import Detokenize


@dataclass(eq=False)
class Ticket:
    """One request: where its events go, and which of its completions still run."""

    request: Request
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | QuartetError] = field(default_factory=asyncio.Queue)
    sequences: list[RunningSequence] = field(default_factory=list)

    def begin(
        self,
        seeds: Sequence[int],
        slot: Slot | None,
        end_tokens: frozenset[int],
        detokenize: Detokenize,
        device: torch.device,
    ) -> list[RunningSequence]:
        """A completion of each seed, where it was before; ended where it had ended there."""
        request, begun = self.request, []
        for index, seed in enumerate(seeds):
            stops = watch(request.sampling, detokenize)
            sequence = RunningSequence(request, index, seed, end_tokens, stops, self, slot, device)
            if request.sampling.grammar:
                assert request.compiled is not None, "it has a grammar"
                sequence.follower = request.compiled.follower(sequence.out)
            begun.append(sequence)
        return begun


def deliver(events: list[tuple[Ticket, Event | QuartetError]]) -> None:
    """Runs in the loop that asked."""
    for ticket, event in events:
        ticket.events.put_nowait(event)
