"""The seeds of a request's completions.

Completion i of a request with seed s draws as completion 0 of a request with seed `completion_seed(s, i)`:
any one of them can be asked for, and go on elsewhere, by itself. Part of the contract (SamplingParams.seed).
"""

from __future__ import annotations

from typing import Final

#: Odd, so that no two of a request's completions share a seed, and large, so that requests with neighbouring
#: seeds share none.
COMPLETIONS_APART: Final = 0xD1B54A32D192ED03


def completion_seed(seed: int, index: int) -> int:
    """The seed with which this completion of a request is the first of another."""
    return (seed + index * COMPLETIONS_APART) % 2**64


def completion_seeds(seed: int, n: int) -> list[int]:
    """The seeds of all n completions of a request."""
    return [completion_seed(seed, index) for index in range(n)]
