"""The history of a run as a script reads it: dicts by the names of verifiers, from metrics.jsonl.

1. A row stands for the batches since the one before: means over them, and the last learning rate.
2. Steps are optimizer steps, as in the arguments.
"""

from __future__ import annotations

from statistics import fmean

from quartet.grpo.translate import Logging
from quartet.scripts.outcome import Row

#: Names of metrics.jsonl, by those of verifiers.
NAMES = {
    "loss": "train/loss",
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "kl": "train/reference_kl",
    "grad_norm": "train/grad_norm",
    "completions/mean_length": "rollout/mean_length",
    "clip_ratio/region_mean": "train/clipped_fraction",
    "entropy": "train/entropy",
}
#: Families that keep their names.
FAMILIES = ("rewards/", "metrics/", "env/", "staleness/")


def log_history(rows: list[Row], steps_per_batch: int, logging: Logging) -> list[Row]:
    """A row whenever one is due, and one for each evaluation, in their order."""
    history: list[Row] = []
    since: list[Row] = []
    for row in rows:
        if "train/reward" not in row:
            history.append(_evaluation(row, steps_per_batch))
            continue
        since.append(row)
        if logging.due(row["step"]):
            history.append(_training(since, steps_per_batch))
            since = []
    return history


def _training(rows: list[Row], steps_per_batch: int) -> Row:
    entry: Row = {"step": rows[-1]["step"] * steps_per_batch}
    names = {**NAMES, **{key: key for row in rows for key in row if key.startswith(FAMILIES)}}
    for name, key in names.items():
        if values := [row[key] for row in rows if key in row]:
            entry[name] = fmean(values)
    entry["learning_rate"] = rows[-1]["train/learning_rate"]
    return entry


def _evaluation(row: Row, steps_per_batch: int) -> Row:
    entry: Row = {"step": row["step"] * steps_per_batch}
    for key, value in row.items():
        if key.startswith("eval/"):
            entry["eval_" + key.removeprefix("eval/")] = value
    return entry
