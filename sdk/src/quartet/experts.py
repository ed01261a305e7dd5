"""Which experts took the tokens of a sequence, as messages: parts joined, positions found, room made.

1. What is known of a sequence is of its first tokens, as many as they are. A part that starts where positions
   were told already takes their place, and that of all behind them.
2. A part that leaves a gap, or is of other sizes, adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quartet.v1 import rollout_pb2

#: Of all samples of one ForwardBackward or Forward call.
MAX_CALL_BYTES: Final = 2 << 30


def end(experts: rollout_pb2.RoutedExperts) -> int:
    """The position behind the last one."""
    return int(experts.start) + len(experts.numbers) // max(1, _row_bytes(experts))


def joined(
    known: rollout_pb2.RoutedExperts | None, part: rollout_pb2.RoutedExperts
) -> rollout_pb2.RoutedExperts:
    """What is known from any position on, with a part behind it."""
    if known is None or part.start <= known.start:
        return part
    alike = (known.layers, known.slots, known.width) == (part.layers, part.slots, part.width)
    if not alike or part.start > end(known):
        return known
    whole = rollout_pb2.RoutedExperts(start=known.start, layers=known.layers, slots=known.slots)
    whole.width = known.width
    whole.numbers = known.numbers[: (part.start - known.start) * _row_bytes(known)] + part.numbers
    return whole


def behind(
    known: rollout_pb2.RoutedExperts | None, turn: rollout_pb2.RoutedExperts | None
) -> rollout_pb2.RoutedExperts | None:
    """What is known of a sequence from its first token on, with a turn's behind it; None: nothing."""
    if turn is None or (known is None and turn.start):
        return known
    return joined(known, turn)


def make_room(samples: Iterable[rollout_pb2.Sample], excess_bytes: int) -> None:
    """Let samples forget experts of their last tokens, the largest first, until so many bytes are gone."""
    told = (sample for sample in samples if sample.HasField("experts"))
    for sample in sorted(told, key=lambda one: -len(one.experts.numbers)):
        if excess_bytes <= 0:
            return
        size, row = len(sample.experts.numbers), max(1, _row_bytes(sample.experts))
        left = max(0, size - excess_bytes) // row * row
        excess_bytes -= size - left
        if left:
            sample.experts.numbers = sample.experts.numbers[:left]
        else:
            sample.ClearField("experts")


def _row_bytes(experts: rollout_pb2.RoutedExperts) -> int:
    """Of one token."""
    return int(experts.layers * experts.slots * experts.width)
