"""What a person sees while environments are evaluated: a live table on a terminal, lines elsewhere, and the
same table at the end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.table import Table

from quartet.cli.display import Plain
from quartet.cli.live_area import LiveArea
from quartet.run.statistics import Summary
from quartet.v1.rollout_pb2 import Rollout

#: A line for at most every tenth part of an evaluation.
PARTS = 10


@dataclass
class Tally:
    """How far one evaluation is: sums, so that a look at it costs nothing.

    Rollouts and rewards are also those of earlier attempts; failures and tokens are of this one.
    """

    name: str
    wanted: int = 0
    results: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    truncated: int = 0
    tokens: int = 0
    began: float = 0.0
    seconds: float = 0.0

    def begin(self, wanted: int, rewards: Sequence[float]) -> None:
        """So many rollouts are wanted in all; some have rewards already."""
        self.wanted, self.began = wanted, time.monotonic()
        self.results, self.reward = len(rewards), sum(rewards)

    def add(self, rollout: Rollout, kind: str) -> None:
        """Take a rollout; `kind` is that of its failure, if it failed."""
        if kind:
            self.failures[kind] += 1
        else:
            self.results += 1
            self.reward += rollout.reward
            self.truncated += rollout.truncated
        self.tokens += rollout.usage.completion_tokens
        self.seconds = time.monotonic() - self.began

    @property
    def ended(self) -> int:
        """Rollouts that ended; of an earlier attempt those with a result."""
        return self.results + sum(self.failures.values())

    @property
    def cells(self) -> list[str]:
        """A row of the live table."""
        rate = f"{self.tokens / self.seconds:.0f}" if self.seconds else ""
        mean = f"{self.reward / self.results:.3f}" if self.results else ""
        return [self.name, f"{self.ended}/{self.wanted}", mean, failures_text(self.failures), rate]


class Board(Protocol):
    """Shows evaluations."""

    def say(self, line: str) -> None:
        """Show one line of news."""

    def update(self, tally: Tally) -> None:
        """A rollout ended."""

    def close(self) -> None:
        """Give the terminal back."""


class PlainBoard(Plain):
    """Lines with the seconds since the beginning."""

    def update(self, tally: Tally) -> None:
        """A line for each part that is done."""
        part = max(1, tally.wanted // PARTS)
        if tally.ended % part == 0 or tally.ended == tally.wanted:
            name, done, mean, failed, _ = tally.cells
            self.say(f"{name}  {done}  reward {mean or '-'}" + (f"  failed {failed}" if failed else ""))


class LiveBoard(LiveArea):
    """A table."""

    def __init__(self, tallies: Sequence[Tally]) -> None:
        self._tallies = tallies
        super().__init__(self._table)

    def update(self, tally: Tally) -> None:
        """The table looks for itself."""

    def _table(self) -> Table:
        table = Table("environment", "rollouts", "reward", "failed", "tokens/s", box=None, padding=(0, 2))
        for tally in self._tallies:
            table.add_row(*tally.cells)
        return table


def board(tallies: Sequence[Tally], *, plain: bool) -> Board:
    """The one for this terminal."""
    return PlainBoard() if plain or not sys.stdout.isatty() else LiveBoard(tallies)


def failures_text(failures: Counter[str]) -> str:
    """ "3 TIMEOUT, 1 MODEL"."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.most_common())


def result_table(rows: Sequence[tuple[str, Summary | None, Counter[str]]]) -> Table:
    """The figures of each evaluation."""
    table = Table("environment", box=None, padding=(0, 1), pad_edge=False)
    ks = sorted({int(k) for _, figures, _ in rows if figures for k in figures.pass_at_k})
    heads = ("results", "reward", "± std. error", "std. dev.", "passes from", *(f"pass@{k}" for k in ks))
    for head in (*heads, "failed"):
        # On a narrow terminal heads and names go on in the next line; figures stay whole.
        table.add_column(head, min_width=max(map(len, head.split())))
    for name, figures, failures in rows:
        if figures is None:
            cells = ["0", *["-"] * (4 + len(ks))]
        else:
            cells = [
                str(figures.results),
                f"{figures.mean:.3f}",
                "-" if figures.error is None else f"{figures.error:.3f}",
                f"{figures.deviation:.3f}",
                f"{figures.threshold:g}",
                *(_shown(figures.pass_at_k.get(str(k))) for k in ks),
            ]
        table.add_row(name, *cells, failures_text(failures) or "0")
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_table(table: Table) -> None:
    """On whatever width it needs: a file is no terminal of 80 letters, and on one nothing is cut."""
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table, crop=False)
