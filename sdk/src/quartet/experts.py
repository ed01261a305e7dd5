"""Which experts took the tokens of a sequence, as messages: parts joined, room made.

1. What is known of a sequence is of its first tokens, as many as they are: whatever was told before stands.
2. A part that begins at or before a position that was told already takes the place of what was told from
   there on. One that leaves a gap, or is of other sizes, adds nothing.
3. Joining takes a time that grows with the bytes, not with the parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quartet.v1 import rollout_pb2

#: Of all samples of one ForwardBackward or Forward call.
MAX_CALL_BYTES: Final = 2 << 30
#: Of a number.
WIDTHS: Final = (1, 2)


def row_bytes(experts: rollout_pb2.RoutedExperts) -> int:
    """Of one token."""
    return int(experts.layers * experts.slots * experts.width)


def sound(experts: rollout_pb2.RoutedExperts) -> bool:
    """Whether it is a message of some tokens, whatever model they are of."""
    row = row_bytes(experts)
    size = len(experts.numbers)
    return experts.width in WIDTHS and 0 < row <= size and size % row == 0


def joined(
    parts: Iterable[rollout_pb2.RoutedExperts], start: int = 0, most_bytes: int | None = None
) -> rollout_pb2.RoutedExperts | None:
    """What the parts tell, in their order, of a position and those behind it; None: nothing.

    At most so many bytes of it.
    """
    first: rollout_pb2.RoutedExperts | None = None
    numbers = bytearray()
    for part in parts:
        if not sound(part) or (first is None and part.start != start):
            continue
        first = first or part
        alike = (first.layers, first.slots, first.width) == (part.layers, part.slots, part.width)
        at = (part.start - start) * row_bytes(first)
        if alike and 0 <= at <= len(numbers):
            numbers[at:] = part.numbers
    if first is None:
        return None
    if most_bytes is not None:
        del numbers[most_bytes // row_bytes(first) * row_bytes(first) :]
    if not numbers:
        return None
    whole = rollout_pb2.RoutedExperts(start=start, layers=first.layers, slots=first.slots, width=first.width)
    whole.numbers = bytes(numbers)
    return whole


def make_room(samples: Iterable[rollout_pb2.Sample], excess_bytes: int) -> None:
    """Let samples forget experts of their last tokens, the largest first, until so many bytes are gone."""
    told = (sample for sample in samples if sample.HasField("experts"))
    for sample in sorted(told, key=lambda one: -len(one.experts.numbers)):
        if excess_bytes <= 0:
            return
        size, row = len(sample.experts.numbers), max(1, row_bytes(sample.experts))
        left = max(0, size - excess_bytes) // row * row
        excess_bytes -= size - left
        if left:
            sample.experts.numbers = sample.experts.numbers[:left]
        else:
            sample.ClearField("experts")
