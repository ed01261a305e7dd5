"""Which environments metrics tell apart by their names: "env/<environment>/reward", "eval/<environment>/...".

An environment's own figures stand below its name: eval/<environment>/rewards/<name>, .../metrics/<name>. One
of these may be called "reward", too, as is what its agents earn: .../agents/<role>/reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

REWARD: Final = "/reward"
OWN_FIGURES: Final = ("/rewards/", "/metrics/", "/agents/")


def environments(kind: str, names: Iterable[str]) -> set[str]:
    """Those that have a reward of their own; `kind` is "env" or "eval"."""
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix).removesuffix(REWARD)
        for name in names
        if name.startswith(prefix)
        and name.endswith(REWARD)
        and name.count("/") > 1
        and name == whose(name) + REWARD
    }


def agents(kind: str, environment: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """What the agents of each role earn, where several do: of those of a game that sum to nothing it is what
    says who wins."""
    prefix = f"{kind}/{environment}/agents/"
    found = {
        name.removeprefix(prefix).removesuffix(REWARD): value
        for name, value in sorted(metrics.items())
        if name.startswith(prefix) and name.endswith(REWARD)
    }
    return found if len(found) > 1 else {}


def whose(name: str) -> str:
    """What stands before a figure: "eval/<environment>", or "eval" of all."""
    for own in OWN_FIGURES:
        if own in name:
            return name.partition(own)[0]
    return name.rpartition("/")[0]
