"""Launchers of ranks (torchrun, accelerate, whoever exports RANK and WORLD_SIZE on each machine) start one
program several times; what starts a run here is started once.
"""

from __future__ import annotations

from collections.abc import Mapping


def rank_said(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """RANK and WORLD_SIZE, "?" for one that is not set; None where they say that this process is the only
    one."""
    rank, world = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    several = world.isdigit() and int(world) > 1
    if several or (rank.isdigit() and int(rank) > 0):
        return rank or "?", world or "?"
    return None
