"""Who computes which rows: the longest row first, each to the rank that has the least to do.

1. Every row has one rank. All ranks compute the same assignment from the same rows.
2. Two ranks differ by at most the cost of one row.
3. Rows that share a prompt stay one row, as packing laid them.

The cost of a row of L tokens is that of its forward pass in a block of width h: 24 L h^2 in the matrices and
4 L^2 h in the attention, in units of the first for one token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def cost(length: int, width: int) -> float:
    """What a row costs, in tokens of short ones."""
    return length * (1 + length / (6 * width))


def assignment(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each row."""
    loads = [(0.0, rank) for rank in range(ranks)]
    chosen = [0] * len(costs)
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, rank = heapq.heappop(loads)
        chosen[row] = rank
        heapq.heappush(loads, (load + costs[row], rank))
    return chosen
