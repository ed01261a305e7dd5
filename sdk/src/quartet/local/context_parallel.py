"""How many of a trainer's ranks can share sequences: a question for the launcher, which knows the machines,
and for the trainer, which knows its ranks.
"""

from __future__ import annotations

from quartet.config import ConfigError


def check_context(context_parallel: int, ranks: int) -> None:
    """Whether so many ranks, of all machines, can share sequences like this. Raises ConfigError."""
    if ranks == 1 < context_parallel:
        raise ConfigError(
            f"context_parallel = {context_parallel} is for several ranks, and there is one; set ranks to a "
            "multiple of it, or context_parallel = 1"
        )
    if ranks % context_parallel:
        raise ConfigError(
            f"context_parallel = {context_parallel} does not divide the {ranks} ranks; set it to a divisor "
            f"of {ranks}"
        )
