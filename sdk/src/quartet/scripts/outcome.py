"""What a script reads of the output folder: where it stands, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quartet.cli.points import Lines

Row = dict[str, Any]

#: What an output folder has (quartet.cli.outputs).
METRICS, CHECKPOINT = "metrics.jsonl", "checkpoint"


class TrainOutput(NamedTuple):
    """What train() returns, by the names of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class TrainerState:
    """Where it stands, in optimizer steps."""

    global_step: int
    max_steps: int
    log_history: list[Row]


def metrics_rows(folder: Path) -> list[Row]:
    """The whole lines of a folder's metrics.jsonl; one may be on its way."""
    return list(Lines(folder / METRICS).new())


def mean_loss(rows: Sequence[Row]) -> float:
    """Over all steps; nan before the first."""
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    return fmean(losses) if losses else float("nan")
