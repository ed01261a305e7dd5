"""A loss of one's own that refuses what only one rank may see."""

from __future__ import annotations

from typing import Any

TOO_MUCH = 100.0


def picky(spec: Any, tokens: Any) -> Any:
    """Likelihood, weighted, and a metric of its own; or an error."""
    if (tokens.advantages_K > TOO_MUCH).any():
        raise ValueError("an advantage beyond all bounds")
    return -tokens.advantages_K * tokens.logp_K, {"advantage": tokens.advantages_K}
