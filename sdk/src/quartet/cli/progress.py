"""What is known of a run from its events: the one state behind the display, the figure and the summary.

1. Pure: events go in, no clock, file or network is touched.
2. Applying an event whose number is not newer than the last one changes nothing, so a replayed stream does
   no harm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quartet.cli.told_apart import agents, environments
from quartet.kit.unknown import enum_name
from quartet.v1.orchestrator_service_pb2 import (
    RUN_PHASE_COMPLETED,
    RUN_PHASE_FAILED,
    RUN_PHASE_STOPPED,
    Ledger,
    RolloutEvent,
    Run,
    RunPhase,
    WatchRunResponse,
)

ENDED = frozenset({RUN_PHASE_COMPLETED, RUN_PHASE_FAILED, RUN_PHASE_STOPPED})
#: Long enough to hold several steps of the demo; of rollouts that take longer, as long as the longest.
RATE_WINDOW_MS = 10_000
#: Of so many rollouts at most: it is told four times a second, and one may take hours among many short ones.
RATED_ROLLOUTS = 10_000
KEPT_SAMPLES = 3
KEPT_NOTES = 5


@dataclass(frozen=True)
class Completion:
    """A sampled completion, for a person to look at."""

    step: int | None
    prompt: str
    answer: str
    reward: float
    #: Of the rollout, whose last turn this is.
    turns: int = 1

    @property
    def whose(self) -> str:
        """What the reward is for, where one turn is not all of it."""
        return "" if self.turns == 1 else f" for all {self.turns} turns"


def phase_name(phase: int) -> str:
    """ "RUN_PHASE_TRAINING" as a person says it."""
    return enum_name(RunPhase, phase).lower()


def ledger_dict(ledger: Ledger) -> dict[str, object]:
    """The ledger as JSON."""
    return {
        "dispatched": ledger.dispatched,
        "trained": ledger.trained,
        "discarded": dict(ledger.discarded),
        "in_flight": ledger.in_flight,
    }


def completion_of(event: RolloutEvent) -> Completion | None:
    """The last prompt and answer of a rollout that carries its messages."""
    rollout = event.rollout
    answers = [m.content for m in rollout.messages if m.role == "assistant"]
    prompts = [m.content for m in rollout.messages if m.role == "user"]
    if not answers or rollout.HasField("failure"):
        return None
    step = event.step if event.HasField("step") else None
    return Completion(step, prompts[-1] if prompts else "", answers[-1], rollout.reward, len(answers))


@dataclass
class Progress:
    """The state of a run."""

    run: Run = field(default_factory=Run)
    last_event: int = 0
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    #: What the agents of each role earned in the evaluation after so many steps, by environment (of each that
    #: it was of); only where one of them rewards several apart.
    agents: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    completions: deque[Completion] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    #: The latest of each step that is not over, and of the one that ended last.
    of_steps: dict[int, Completion] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    #: When a rollout began and ended, and its sampled tokens.
    _sampled: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=RATED_ROLLOUTS))
    #: What is kept of them: of so many milliseconds.
    _kept_ms: int = RATE_WINDOW_MS

    def begin(self, run: Run) -> None:
        """The run as it stands before the events that are still to come."""
        self.run, self.ledger = run, run.ledger

    def apply(self, event: WatchRunResponse) -> bool:
        """Take one event. Whether it was new."""
        if event.event == 0 or event.event <= self.last_event:
            return False
        self.last_event = event.event
        match event.WhichOneof("kind"):
            case "phase":
                self.run = event.phase.run
                self.ledger = event.phase.run.ledger
            case "step":
                self.add_step(event.step.step, dict(event.step.metrics))
                self.ledger = event.step.ledger
            case "eval":
                self.add_eval(event.eval.step, dict(event.eval.metrics))
            case "rollout":
                self._rollout(event.at_ms, event.rollout)
            case "note":
                self.notes.append(event.note.message)
        return True

    def add_step(self, step: int, metrics: dict[str, float]) -> None:
        """A step was applied."""
        self.step, self.metrics = step, metrics
        self.of_steps = {number: one for number, one in self.of_steps.items() if number >= step}
        if "train/reward" in metrics:
            self.rewards.append((step, metrics["train/reward"]))

    def add_eval(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation ended."""
        if "eval/reward" in metrics:
            self.evals.append((step, metrics["eval/reward"]))
        earned = {name: agents("eval", name, metrics) for name in sorted(environments("eval", metrics))}
        if any(earned.values()):
            self.agents[step] = earned

    def _rollout(self, at_ms: int, event: RolloutEvent) -> None:
        rollout = event.rollout
        self._sampled.append((at_ms - rollout.timing.total_ms, at_ms, rollout.usage.completion_tokens))
        self._kept_ms = max(self._kept_ms, rollout.timing.total_ms)
        while self._sampled[0][1] < at_ms - self._kept_ms:
            self._sampled.popleft()
        completion = completion_of(event)
        if completion is not None:
            self.completions.append(completion)
            if completion.step is not None and completion.step >= self.step:
                self.of_steps[completion.step] = completion

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of the rollouts that ended lately, over the time in which they did, or since the
        first of them began: those that end together were not sampled in that moment. Lately is as long as
        one takes: in less of it end fewer than are under way."""
        if not self._sampled:
            return 0.0
        now_ms = self._sampled[-1][1]
        took_ms = [end - began for began, end, _ in self._sampled if end > now_ms - RATE_WINDOW_MS]
        window_ms = max(RATE_WINDOW_MS, *took_ms)
        if len(self._sampled) == RATED_ROLLOUTS:
            window_ms = min(window_ms, max(1, now_ms - self._sampled[0][1]))  # clocks are set back, too
        lately = [(began, count) for began, end, count in self._sampled if end > now_ms - window_ms]
        span_ms = min(window_ms, now_ms - min(began for began, _ in lately))
        return 1000.0 * sum(count for _, count in lately) / span_ms if span_ms > 0 else 0.0

    @property
    def ended(self) -> bool:
        """Whether the run is completed, failed or stopped."""
        return self.run.phase in ENDED
