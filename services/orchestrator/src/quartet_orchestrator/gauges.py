"""The runs, for Prometheus: where each stands, what it waits for, what its last step and evaluation measured.

1. The names are those of metrics.jsonl, as a label: quartet_run_metric{run="demo", name="train/reward"}.
2. Series are bounded: of MAX_RUNS runs, those under way and then those that ended last, so that the last
   values of a run that has ended can still be scraped; last those whose journals are not read yet, of which
   nothing is known.
   All runs are counted by phase, also those beyond.
3. What a run does is an Activity, and its phase a RunPhase: sets of states of which one is 1. A run that
   rests does nothing, and nothing of it is in flight: what an end left open is kept until it is resumed.
4. `collect` runs in the thread of the endpoint and only reads numbers, and mappings that are replaced whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from quartet.kit.unknown import enum_name
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator.activity import Activity
from quartet_orchestrator.state import RESTING, TRANSITIONS, UNSPECIFIED, RunState

#: Each has some eighty series.
MAX_RUNS = 32

PHASES = [phase for phase in TRANSITIONS if phase != UNSPECIFIED]


@dataclass(frozen=True)
class UnderWay:
    """Of a run that something works at; both times on the monotonic clock."""

    activity: Activity
    #: When its turn came; None: it waits for it.
    turn_at: float | None
    #: When it last moved.
    moved_at: float


@dataclass(frozen=True)
class Glance:
    """A run as it is right now."""

    state: RunState
    #: None where it rests.
    under_way: UnderWay | None = None

    @property
    def has_turn(self) -> bool:
        """Whether anything of it can be in flight."""
        return self.under_way is not None and self.under_way.turn_at is not None


class RunGauges(Collector):
    """Reads the runs when somebody scrapes."""

    def __init__(self, runs: Callable[[], list[Glance]]) -> None:
        self._runs = runs

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The families without values: to register them reads no run."""
        return Families().all

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The families with the values of at most MAX_RUNS runs."""
        families = Families()
        runs = self._runs()
        counts = Counter(run.state.phase for run in runs)
        for phase in PHASES:
            families.runs.add_metric([enum_name(pb.RunPhase, phase)], counts[phase])
        for run in shown(runs):
            families.add_state(run.state, in_flight=run.has_turn)
            if run.under_way is not None:
                families.add_under_way(run.state, run.under_way)
        return families.all


class Families:
    """What one scrape is told."""

    def __init__(self) -> None:
        self.all: list[GaugeMetricFamily] = []
        self.runs = self._family("quartet_runs", "Runs by phase.", "phase")
        self._phase = self._family("quartet_run_phase", "1 for the phase that a run is in.", "run", "phase")
        self._activity = self._family(
            "quartet_run_activity", "1 for what a run does or waits for.", "run", "activity"
        )
        self._since_step = self._family(
            "quartet_run_since_step_seconds",
            "Since the last step of a run that has its turn, its turn, or its phase: whichever came last.",
            "run",
        )
        self._still = self._family(
            "quartet_run_still_seconds", "Since a run that has its turn last wrote anything down.", "run"
        )
        self._steps = self._family("quartet_run_steps", "Steps that a run has applied.", "run")
        self._max_steps = self._family("quartet_run_max_steps", "Steps after which a run is complete.", "run")
        self._rollouts = self._family("quartet_run_rollouts", "Rollouts of a run.", "run", "state")
        self._discarded = self._family(
            "quartet_run_discarded", "Rollouts of a run that were given up.", "run", "reason"
        )
        self._metric = self._family(
            "quartet_run_metric", "Of a run's last step or evaluation.", "run", "name"
        )

    def _family(self, name: str, what: str, *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=labels)
        self.all.append(family)
        return family

    def add_state(self, run: RunState, *, in_flight: bool) -> None:
        """What the records of a run say."""
        for phase in PHASES:
            self._phase.add_metric([run.run_id, enum_name(pb.RunPhase, phase)], run.phase == phase)
        self._steps.add_metric([run.run_id], run.step)
        self._max_steps.add_metric([run.run_id], run.max_steps)
        ledger, left = run.ledger, run.ledger.in_flight
        for state, rollouts in (
            ("dispatched", ledger.dispatched),
            ("trained", ledger.trained),
            ("discarded", ledger.discarded.total()),
            ("in_flight", left if in_flight else 0),
            ("kept", 0 if in_flight else left),
        ):
            self._rollouts.add_metric([run.run_id, state], rollouts)
        for reason, rollouts in dict(ledger.discarded).items():
            self._discarded.add_metric([run.run_id, reason], rollouts)
        for name, value in {**run.eval_metrics, **run.metrics}.items():
            self._metric.add_metric([run.run_id, name], value)

    def add_under_way(self, run: RunState, under_way: UnderWay) -> None:
        """What something works at."""
        for activity in Activity:
            self._activity.add_metric([run.run_id, activity.name], activity is under_way.activity)
        if under_way.turn_at is None:
            return
        turn_s, still_s = (time.monotonic() - at for at in (under_way.turn_at, under_way.moved_at))
        recorded_s = time.time() - max(run.last_step_at_ms, run.phase_at_ms) / 1000
        self._since_step.add_metric([run.run_id], max(0.0, min(turn_s, recorded_s)))
        self._still.add_metric([run.run_id], max(0.0, min(turn_s, still_s)))


def shown(runs: Iterable[Glance]) -> list[Glance]:
    """Those under way first, the latest of them before the others, then those that rest, by their ends."""

    def place(run: Glance) -> tuple[bool, int]:
        state = run.state
        rests = state.phase in RESTING or not state.submitted_at_ms
        return rests, -(state.phase_at_ms if rests else state.submitted_at_ms)

    return sorted(runs, key=place)[:MAX_RUNS]
