"""Which environments metrics tell apart by their names: "env/<environment>/reward", "eval/<environment>/...".

An environment's own figures stand below its name: eval/<environment>/rewards/<name>, .../metrics/<name>. One
of these may be called "reward", too, as is what its agents earn: .../agents/<role>/reward.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def whose(name: str) -> str:
    """What stands before a figure: "eval/<environment>", or "eval" of all."""
    for own in OWN_FIGURES:
        if own in name:
            return name.partition(own)[0]
    return name.rpartition("/")[0]
