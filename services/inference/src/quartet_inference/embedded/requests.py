"""The requests in the decoding thread: those that wait for a place in the batch, and what each is told.

1. Each completion waits, is in the batch, or has ended; a request that was dropped is nowhere any more.
2. They join in the order in which they came; rows that had to leave the batch come before all others.
3. Events reach their loops in the order in which they were sent, with one wake-up of each loop a step.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from quartet.errors import QuartetError

from quartet_inference.embedded.batch import Batch
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.lora import Slot
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.embedded.tickets import Ticket, deliver
from quartet_inference.engine import Event


class Requests:
    """Those of one decoder. For its thread."""

    def __init__(self, batch: Batch, commands: Commands) -> None:
        self._batch, self._commands = batch, commands
        # In the order in which they join; keys alone, because any of them may leave.
        self.waiting: OrderedDict[RunningSequence, None] = OrderedDict()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event | QuartetError]]] = {}

    def all(self) -> list[Ticket]:
        """Those in the batch, and those that wait."""
        return tickets_of([*self._batch.rows, *self.waiting])

    def of(self, slot: Slot | None) -> list[Ticket]:
        """Those that an adapter has to answer, or the base model."""
        return tickets_of(row for row in [*self._batch.rows, *self.waiting] if row.slot is slot)

    def wait(self, completions: Iterable[RunningSequence]) -> None:
        """Let completions that are admitted wait behind all others."""
        self.waiting.update(dict.fromkeys(completions))

    def join(self, count: int) -> list[RunningSequence]:
        """Take so many out of the queue, into the batch."""
        joiners = [self.waiting.popitem(last=False)[0] for _ in range(count)]
        self._commands.admitted(-len(joiners))
        return joiners

    def hand_back(self, rows: Iterable[RunningSequence]) -> None:
        """Let rows that have left the batch wait before all others, the last one foremost."""
        for row in rows:
            self.waiting[row] = None
            self.waiting.move_to_end(row, last=False)
            self._commands.admitted(1)

    def drop(self, ticket: Ticket) -> None:
        """Take what is left of a request out of the batch and the queue."""
        for sequence in ticket.sequences:
            if sequence.row is not None:
                self._batch.remove(sequence)
            elif sequence in self.waiting:
                del self.waiting[sequence]
                self._commands.admitted(-1)
        ticket.sequences.clear()

    def fail(self, ticket: Ticket, error: QuartetError) -> None:
        """End a request."""
        self.drop(ticket)
        self.send(ticket, error)

    def send(self, ticket: Ticket, event: Event | QuartetError) -> None:
        """Tell whoever asked, with the next delivery."""
        self._outbox.setdefault(ticket.loop, []).append((ticket, event))

    def deliver(self) -> None:
        """Hand what was sent to the loops."""
        for loop, events in self._outbox.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, events)
        self._outbox = {}


def tickets_of(rows: Iterable[RunningSequence]) -> list[Ticket]:
    """The requests of these completions, in their order."""
    return list({row.ticket: None for row in rows})
