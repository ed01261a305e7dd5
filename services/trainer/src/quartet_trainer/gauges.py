"""The trainer, for Prometheus: its runs, how busy its worker is, what it holds.

1. A run is a label while it is open here, and so at most max_runs at once.
2. Steps of a run may go back: it may be returned to a state. Seconds never do.
3. `collect` runs in the thread of the endpoint; it never waits for the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quartet_trainer.intake import Intake
from quartet_trainer.results import RunStatus
from quartet_trainer.roster import Roster
from quartet_trainer.worker import Worker


class TrainerGauges(Collector):
    """Reads the trainer when somebody scrapes."""

    def __init__(self, roster: Roster, intake: Intake, worker: Worker) -> None:
        self._roster, self._intake, self._worker = roster, intake, worker

    def collect(self) -> Iterable[Metric]:
        """The families."""
        runs = self._roster.statuses()
        yield GaugeMetricFamily("quartet_trainer_runs", "Runs that are open.", len(runs))
        yield GaugeMetricFamily(
            "quartet_trainer_max_runs", "Runs that may be open at once.", self._roster.max_runs
        )
        yield from _of_runs(runs)
        yield GaugeMetricFamily(
            "quartet_trainer_jobs", "Jobs of the worker that run or wait.", self._worker.pending
        )
        yield CounterMetricFamily(
            "quartet_trainer_computing_seconds",
            "That the worker has run jobs; the rest of the time it waited for one.",
            self._worker.computed_s,
        )
        samples, experts = self._intake.held_bytes
        held = GaugeMetricFamily(
            "quartet_trainer_held_bytes",
            "Of calls under way, as they came: samples, and which experts took their tokens.",
            labels=["what"],
        )
        held.add_metric(["samples"], samples)
        held.add_metric(["experts"], experts)
        yield held


def _of_runs(runs: Mapping[str, RunStatus]) -> Iterable[Metric]:
    steps = GaugeMetricFamily(
        "quartet_trainer_run_steps", "Optimizer steps of an open run.", labels=["run", "outcome"]
    )
    policy = GaugeMetricFamily(
        "quartet_trainer_policy_version", "Of the weights that a run has.", labels=["run"]
    )
    published = GaugeMetricFamily(
        "quartet_trainer_published_version", "Of the weights that a run published last.", labels=["run"]
    )
    for run_id, status in runs.items():
        steps.add_metric([run_id, "applied"], status.policy_version - status.skipped_steps)
        steps.add_metric([run_id, "skipped"], status.skipped_steps)
        policy.add_metric([run_id], status.policy_version)
        if status.published_version is not None:
            published.add_metric([run_id], status.published_version)
    return steps, policy, published
