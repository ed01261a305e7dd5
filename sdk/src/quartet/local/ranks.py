"""Launchers of ranks (torchrun, accelerate, whoever exports RANK and WORLD_SIZE on each machine) start one
program several times; what starts a run here is started once. And how many of them can share sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.config import ConfigError


def rank_said(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """RANK and WORLD_SIZE, "?" for one that is not set; None where they say that this process is the only
    one."""
    rank, world = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    several = world.isdigit() and int(world) > 1
    if several or (rank.isdigit() and int(rank) > 0):
        return rank or "?", world or "?"
    return None


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
