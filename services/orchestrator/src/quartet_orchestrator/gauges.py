"""What the runs measure, for Prometheus: the values of the last step and of the last evaluation.

1. The names are those of metrics.jsonl, as a label: quartet_run_metric{run="demo", name="train/reward"}.
2. Series are bounded: of MAX_RUNS runs, those under way and then the latest, so that the last values of a run
   that has ended can still be scraped.
3. `collect` runs in the thread of the endpoint and only reads numbers, and mappings that are replaced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from quartet_orchestrator.state import RESTING, RunState

#: Each has some sixty series.
MAX_RUNS = 32


class RunGauges(Collector):
    """Reads the runs when somebody scrapes."""

    def __init__(self, states: Callable[[], list[RunState]]) -> None:
        self._states = states

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The families without values: to register them reads no run."""
        return _families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The families with the values of at most MAX_RUNS runs."""
        families = metric, steps, rollouts = _families()
        for run in shown(self._states()):
            for name, value in {**run.eval_metrics, **run.metrics}.items():
                metric.add_metric([run.run_id, name], value)
            steps.add_metric([run.run_id], run.step)
            for state in ("dispatched", "trained", "in_flight"):
                rollouts.add_metric([run.run_id, state], getattr(run.ledger, state))
        return families


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            "quartet_run_metric", "Of a run's last step or evaluation.", labels=["run", "name"]
        ),
        GaugeMetricFamily("quartet_run_steps", "Steps that a run has applied.", labels=["run"]),
        GaugeMetricFamily("quartet_run_rollouts", "Rollouts of a run.", labels=["run", "state"]),
    )


def shown(states: Iterable[RunState]) -> list[RunState]:
    """Those under way first, then the latest."""
    in_order = sorted(states, key=lambda run: (run.phase in RESTING, -run.submitted_at_ms))
    return in_order[:MAX_RUNS]


@contextmanager
def scraped(states: Callable[[], list[RunState]]) -> Iterator[None]:
    """While inside, the process's endpoint tells of the runs."""
    gauges = RunGauges(states)
    REGISTRY.register(gauges)
    try:
        yield
    finally:
        REGISTRY.unregister(gauges)
