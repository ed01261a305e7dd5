"""What a person sees of a run: a live screen on a terminal, one line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from quartet.cli.progress import Progress, phase_name
from quartet.cli.told_apart import agents, environments
from quartet.counted import counted
from quartet.kit.standard_streams import say
from quartet.local.supervisor import Status
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_STOPPING, EvalEvent, WatchRunResponse

#: Steps from one printed completion to the next; all are in rollouts/.
STEPS_OF_A_COMPLETION = 10
SHOWN_LETTERS = 100
#: Somebody looks at the log, and wonders.
QUIET_MS = 60_000


class Display(Protocol):
    """Shows a run."""

    def event(self, event: WatchRunResponse, progress: Progress) -> None:
        """An event was taken."""

    def tick(self, progress: Progress, services: Sequence[Status]) -> None:
        """Time passed."""

    def say(self, line: str) -> None:
        """Show one line of news."""

    def close(self) -> None:
        """The run ended."""


def step_line(progress: Progress) -> str:
    """The last step in one line."""
    metrics, ledger = progress.metrics, progress.ledger
    parts = [f"step {progress.step}/{progress.run.max_steps}"]
    for name, label, form in (
        ("train/reward", "reward", ".3f"),
        ("train/loss", "loss", "+.4g"),
        ("train/learning_rate", "lr", ".1e"),
        ("train/mismatch_kl", "mismatch kl", ".1e"),
        ("train/reference_kl", "reference kl", ".1e"),
        ("staleness/max", "staleness", ".0f"),
        ("rollout/mean_length", "length", ".1f"),
        ("rollout/generation_time", "seconds/rollout", ".2f"),
        ("train/logprob_difference_max", "|dlogp|", ".1e"),
    ):
        if name == "train/reward" and name in metrics:
            parts += _rewards(f"{label} {metrics[name]:{form}}", metrics, "env")
        elif name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    parts.append(f"{metrics.get('tokens_per_second', 0.0):.0f} tok/s")
    discarded = sum(ledger.discarded.values())
    parts.append(f"trained {ledger.trained} of {ledger.dispatched}, discarded {discarded}")
    return "  ".join(parts)


def eval_line(event: EvalEvent) -> str:
    """One line about an evaluation; what was not measured is no reward."""
    metrics = event.metrics
    about = f"evaluation after {counted(event.step, 'step')}"
    if "eval/reward" not in metrics:
        return f"{about}: no result, as none of its rollouts has one"
    parts = _rewards(f"{about}: reward {metrics['eval/reward']:.3f}", metrics, "eval")
    if metrics.get("eval/coverage", 1.0) < 1.0:
        parts.append(f"from {metrics['eval/coverage']:.0%} of its rollouts")
    return "  ".join(parts)


def _rewards(total: str, metrics: Mapping[str, float], kind: str) -> list[str]:
    """That of all, of each environment where there are several, and what the agents of each earn."""
    names = sorted(environments(kind, metrics))
    earned = {name: _of_agents(agents(kind, name, metrics)) for name in names}
    if len(names) < 2:
        return [total + "".join(earned.values())]
    return [total, *(f"{name} {metrics[f'{kind}/{name}/reward']:.3f}{earned[name]}" for name in names)]


def _of_agents(rewards: Mapping[str, float]) -> str:
    each = ", ".join(f"{role} {reward:.3f}" for role, reward in rewards.items())
    return f" ({each})" if each else ""


def event_line(event: WatchRunResponse, progress: Progress) -> str:
    """One line about an event; empty where it says nothing to a person."""
    match event.WhichOneof("kind"):
        case "step":
            return step_line(progress)
        case "eval":
            return eval_line(event.eval)
        case "phase":
            # Of one that stops by itself the next line tells it: STOPPED.
            stopping = event.phase.run.phase == RUN_PHASE_STOPPING
            error = "" if stopping else event.phase.run.error
            return f"run {event.phase.run.run_id}: {phase_name(event.phase.run.phase)}" + (
                f": {error}" if error else ""
            )
        case "note":
            return f"note: {event.note.message}"
    return ""


class Plain:
    """One line for each event and each change of a service, with the seconds since the beginning of this
    display. Where a run is followed that others began, events have the seconds of the run, by the clock that
    stamped them; what is said besides is no part of that, and has none. Rollouts have no lines of their own:
    they are counted where nothing else was said for QUIET_MS."""

    def __init__(self, out: TextIO | None = None, *, submitted_at_ms: int | None = None) -> None:
        self._out = out or sys.stdout
        #: Until a line finds no reader (`| head`, a closed terminal). What is shown goes on without.
        self.is_read = True
        self._began = time.monotonic()
        self._submitted_at_ms = submitted_at_ms
        self._restarts: dict[str, int] = {}
        #: When an event was said last, and the rollouts since then.
        self._said_ms: float | None = None
        self._ended, self._failed = 0, 0

    def event(self, event: WatchRunResponse, progress: Progress) -> None:
        """A line, where the event says something; after a step in ten also a completion."""
        if event.WhichOneof("kind") == "rollout":
            self._ended += 1
            self._failed += event.rollout.rollout.HasField("failure")
        if self._said_ms is None:
            self._said_ms = event.at_ms
        line = event_line(event, progress)
        if not line and event.at_ms - self._said_ms >= QUIET_MS:
            line = self._counted(event, progress)
        if line:
            self._print(event.at_ms, line)
            self._said_ms, self._ended, self._failed = event.at_ms, 0, 0
        if event.WhichOneof("kind") == "step" and (event.step.step - 1) % STEPS_OF_A_COMPLETION == 0:
            self._completion(event.at_ms, progress)

    def _counted(self, event: WatchRunResponse, progress: Progress) -> str:
        """What happens where no step ends for long; empty where the event is no rollout."""
        if event.WhichOneof("kind") != "rollout":
            return ""
        # Some may be the next step's already.
        where = f"step {progress.step + 1}" if event.rollout.HasField("step") else "the evaluation"
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{where} goes on: {counted(self._ended, 'rollout')} ended since the last line{failed}"

    def _completion(self, at_ms: float, progress: Progress) -> None:
        if last := progress.of_steps.get(progress.step):
            # A prompt of tokens is no text here.
            shown = (last.prompt, last.answer) if last.prompt else (last.answer,)
            texts = [repr(" ".join(text.split())[-SHOWN_LETTERS:]) for text in shown]
            said = f"completion: {' -> '.join(texts)}  reward {last.reward:.3f}"
            self._print(at_ms, said + last.whose)

    def tick(self, progress: Progress, services: Sequence[Status]) -> None:
        """A line for each service that was restarted since the last one."""
        for status in services:
            before = self._restarts.get(status.name, 0)
            self._restarts[status.name] = status.restarts  # fewer on a machine that came back
            if status.restarts > before:
                why = f": {status.why}" if status.why else ""
                self.say(f"{status.name} died and is started again (restart {status.restarts}){why}")

    def say(self, line: str) -> None:
        """Print the line."""
        self._print(None, line)

    def _print(self, at_ms: float | None, line: str) -> None:
        submitted = self._submitted_at_ms
        if submitted is None:
            when = f"{time.monotonic() - self._began:6.1f} s"
        else:
            when = "" if at_ms is None else f"{(at_ms - submitted) / 1000:6.1f} s"
        self.is_read = say(f"{when:8}  {line}", self._out) and self.is_read

    def close(self) -> None:
        """Nothing to put away."""
