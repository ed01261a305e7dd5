"""Which policy versions of a run were evaluated best, as its output folder tells.

1. Of a run they are compared by `eval/reward`, of a fine-tuning by `val/loss`, or by another number that its
   evaluations have. Of a loss and a perplexity the smallest is the best, of all else the largest.
2. Of equal ones the later is better: it is nearer to where the run was going.
3. Of a version that was evaluated twice (once more after a crash) the last evaluation counts.
4. An evaluation of which more than a tenth of the rollouts failed comes behind all others: what is left of it
   may be the easy part.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quartet.cli.measured_lines import METRICS, Row, measured_lines
from quartet.cli.told_apart import whose
from quartet.config import ConfigError

#: What is compared where nothing else is asked for: of a run, of a fine-tuning.
USUAL: Final = ("eval/reward", "val/loss")
#: The last parts of names of which less is better.
LESS_IS_BETTER: Final = ("loss", "perplexity")
OF_EVALUATIONS: Final = ("eval/", "val/")
#: What is measured of fewer of the rollouts that were asked for is not compared with what is of all.
LEAST_COVERAGE: Final = 0.9


@dataclass(frozen=True)
class Evaluated:
    """A policy version, and what an evaluation said of it."""

    version: int
    value: float
    #: Results, of the rollouts that were asked for.
    coverage: float

    def __str__(self) -> str:
        """For a person."""
        part = f", from {self.coverage:.0%} of its rollouts" if self.coverage < 1 else ""
        return f"{self.value:.4g} (version {self.version}{part})"


def coverage_of(row: Row, metric: str) -> float:
    """Of which part of its rollouts an evaluation has a number: of its environment's, or of all."""
    own = f"{whose(metric)}/coverage"
    return float(row[own] if own in row else row.get("eval/coverage", 1.0))


def evaluated_best(folder: Path, metric: str | None = None) -> tuple[str, list[Evaluated]]:
    """The metric, and every policy version with it, the best first. Raises ConfigError."""
    rows = [row for row in measured_lines(folder) if _names(row)]
    if not rows:
        raise ConfigError(
            f"{str(folder)!r} has no evaluation (in {METRICS}) to choose by; name a state with --state, and "
            "evaluate the next run: eval.interval = ckpt.interval"
        )
    known = {name for row in rows for name in _names(row)}
    metric = metric or next((name for name in USUAL if name in known), None)
    if metric not in known:
        raise ConfigError(_unknown(metric, known))
    found = {
        _version(row): Evaluated(_version(row), float(row[metric]), coverage_of(row, metric))
        for row in rows
        if metric in row
    }
    sign = -1 if metric.rpartition("/")[2] in LESS_IS_BETTER else 1

    def rank(one: Evaluated) -> tuple[bool, float, int]:
        return one.coverage >= LEAST_COVERAGE, sign * one.value, one.version

    return metric, sorted(found.values(), key=rank, reverse=True)


def _names(row: Row) -> set[str]:
    return {name for name, value in row.items() if name.startswith(OF_EVALUATIONS) and type(value) is float}


def _version(row: Row) -> int:
    """A fine-tuning's version is its step: one optimizer step each."""
    return int(row["policy_version"] if "policy_version" in row else row["step"])


def _unknown(metric: str | None, known: set[str]) -> str:
    all_known = ", ".join(sorted(known))
    if metric is None:
        return f"the evaluations have no {' and no '.join(USUAL)}; name with --by one of {all_known}"
    close = difflib.get_close_matches(metric, known, n=1)
    return f"--by {metric}: no evaluation has it; " + (
        f"did you mean {close[0]!r}?" if close else f"they have {all_known}"
    )
