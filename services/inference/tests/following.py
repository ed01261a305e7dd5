"""What a grammar allows, token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from quartet_inference.structure.following import Follower, Structures


def allowed(follower: Follower) -> set[int]:
    """The tokens that may come next."""
    words = np.zeros(follower.words, dtype=np.uint32)
    follower.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if follower.stuck:
        return set()
    return set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def follow(structures: Structures, grammar: str, tokens: Iterable[int]) -> Follower | None:
    """Behind these tokens; None where one of them is not allowed."""
    follower = structures.follower(grammar)
    for token in tokens:
        if token not in allowed(follower):
            return None
        follower.accept(token)
    return follower


def end_of(follower: Follower | None, end_tokens: Collection[int]) -> bool:
    """Whether the completion may end here: by any of the end tokens, or by none."""
    if follower is None:
        return False
    ends = allowed(follower) & set(end_tokens)
    assert ends in (set(), set(end_tokens))
    return bool(ends)
