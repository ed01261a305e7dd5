"""The history of a run as a script reads it: dicts by names of its own, from metrics.jsonl.

1. A row stands for the batches since the one before: means over them, and the last learning rate.
2. Steps are optimizer steps, as in the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from quartet.grpo.translate import Logging
from quartet.scripts.loop import Moment
from quartet.scripts.outcome import Row


@dataclass(frozen=True)
class History:
    """By which names a script reads metrics."""

    #: Names of metrics.jsonl, by those of the script.
    names: Mapping[str, str]
    #: Families, by what they begin with there, and how a script calls one of them.
    families: Mapping[str, str]
    #: Of evaluations, how a script calls what is called otherwise there, and families of them.
    of_evaluations: Mapping[str, str] = field(default_factory=dict)
    families_of_evaluations: Mapping[str, str] = field(default_factory=dict)
    #: The one environment that there is, if there is one: its own figures are those of an evaluation.
    environment: str = ""

    def of(self, rows: Iterable[Row], steps_per_batch: int, logging: Logging) -> list[Row]:
        """A row whenever one is due, and one for each evaluation, in their order."""
        growing = Growing(self, steps_per_batch, logging)
        return [moment.row for moment in map(growing.after, rows) if moment.row is not None]

    def training(self, rows: list[Row], steps_per_batch: int) -> Row:
        entry: Row = {"step": rows[-1]["step"] * steps_per_batch}
        every = dict.fromkeys(key for row in rows for key in row if key not in self.names.values())
        own = {called: key for key in every if (called := _called(key, self.families)) is not None}
        # What a script measures may be called as what everybody measures is: that has its name.
        taken = {"step", "learning_rate", *self.names}
        told = {key if called in taken else called: key for called, key in own.items()}
        for name, key in {**self.names, **told}.items():
            if values := [row[key] for row in rows if key in row]:
                entry[name] = fmean(values)
        entry["learning_rate"] = rows[-1]["train/learning_rate"]
        return entry

    def evaluation(self, row: Row, steps_per_batch: int) -> Row:
        entry: Row = {"step": row["step"] * steps_per_batch}
        of_families: dict[str, tuple[str, float]] = {}
        for key, value in row.items():
            if key.startswith("eval/"):
                name = key.removeprefix("eval/").removeprefix(f"{self.environment}/")
                called = self.of_evaluations.get(name)
                if called is None and (called := _called(name, self.families_of_evaluations)) is not None:
                    of_families[name] = f"eval_{called}", value
                else:
                    entry[f"eval_{called or name}"] = value
        for name, (called, value) in of_families.items():
            entry[f"eval_{name}" if called in entry else called] = value
        return entry


class Growing:
    """A history as it grows."""

    def __init__(self, history: History, steps_per_batch: int, logging: Logging) -> None:
        self._history, self._steps_per_batch, self._logging = history, steps_per_batch, logging
        self._since: list[Row] = []

    def after(self, row: Row) -> Moment:
        """What the next line of metrics says."""
        per_batch = self._steps_per_batch
        step = row["step"] * per_batch
        if "train/reward" not in row:
            return Moment(step, self._history.evaluation(row, per_batch), is_evaluation=True)
        if self._logging.every:
            self._since.append(row)
        if not self._logging.due(row["step"]):
            return Moment(step, None)
        since, self._since = self._since, []
        return Moment(step, self._history.training(since, per_batch))


def _called(key: str, families: Mapping[str, str]) -> str | None:
    """How a script calls one of a family; None where it is of none."""
    for begins, called in families.items():
        if key.startswith(begins):
            return called.format(key.removeprefix(begins))
    return None


OF_VERIFIERS = History(
    names={
        "loss": "train/loss",
        "reward": "train/reward",
        "reward_std": "train/reward_std",
        "kl": "train/reference_kl",
        "grad_norm": "train/grad_norm",
        "completions/mean_length": "rollout/mean_length",
        "clip_ratio/region_mean": "train/clipped_fraction",
        "entropy": "train/entropy",
    },
    # Families that keep their names.
    families={name: f"{name}{{}}" for name in ("rewards/", "metrics/", "env/", "staleness/")},
)
