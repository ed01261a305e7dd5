"""The seeds of a request's completions.

Completion i of a request with seed s draws as completion 0 of a request with seed `completion_seed(s, i)`:
any one of them can be asked for, and go on elsewhere, by itself. Part of the contract (SamplingParams.seed).
"""

from __future__ import annotations

from typing import Final

from quartet.errors import refused
from quartet.v1.inference_service_pb2 import GenerateRequest

#: Odd, so that no two of a request's completions share a seed, and large, so that requests with neighbouring
#: seeds share none.
COMPLETIONS_APART: Final = 0xD1B54A32D192ED03


def completion_seed(seed: int, index: int) -> int:
    """The seed with which this completion of a request is the first of another."""
    return (seed + index * COMPLETIONS_APART) % 2**64


def completion_seeds(seed: int, n: int) -> list[int]:
    """The seeds of all n completions of a request."""
    return [completion_seed(seed, index) for index in range(n)]


def requested_seeds(request: GenerateRequest) -> list[int]:
    """The seed of each completion that is asked for; none where they are unseeded. Raises INVALID_REQUEST."""
    given, n, seeded = request.completion_seeds, max(1, request.n), request.sampling.HasField("seed")
    if not given:
        return completion_seeds(request.sampling.seed, n) if seeded else []
    if len(given) != n:
        raise refused("completion_seeds", f"{len(given)} seeds", f"give one for each of the {n} completions")
    if seeded:
        raise refused("sampling.seed", request.sampling.seed, "leave it out beside completion_seeds")
    return list(given)
