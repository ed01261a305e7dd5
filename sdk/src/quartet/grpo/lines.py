"""What a script prints of its run: a line every so many steps, with a few conversations.

A line stands for the steps since the one before, as a row of the history does (history.py): means, of what
is the most of a step the most, and the last learning rate.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from quartet.cli.display import Plain
from quartet.cli.progress import Completion, Progress, completion_of
from quartet.grpo.translate import Logging
from quartet.local.supervisor import Status
from quartet.scripts.waiting import nothing
from quartet.v1.orchestrator_service_pb2 import WatchRunResponse

#: Of a conversation, that many characters at each end of what is longer.
SHOWN = 2000
LEARNING_RATE = "train/learning_rate"


class Lines(Plain):
    """Prints what is due, and everything but steps."""

    def __init__(
        self,
        logging: Logging,
        in_words: Callable[[str], str] = str,
        begun: Callable[[], object] = nothing,
    ) -> None:
        """`in_words` makes of a line what a script calls it; `begun` is called, perhaps often, once the
        orchestrator has the run."""
        super().__init__(sys.stdout)
        self._logging, self._in_words, self._begun = logging, in_words, begun
        # By step: rollouts of the next one arrive before this one is applied.
        self._seen: dict[int, list[Completion]] = defaultdict(list)
        self._since: list[Mapping[str, float]] = []

    def tick(self, progress: Progress, services: Sequence[Status]) -> None:
        """Whether it has begun, and of services their line."""
        if progress.run.run_id:
            self._begun()
        super().tick(progress, services)

    def event(self, event: WatchRunResponse, progress: Progress) -> None:
        """A step where one is due, with a few of its conversations; of other events their line."""
        kind = event.WhichOneof("kind")
        if kind == "rollout" and event.rollout.HasField("step"):
            seen = self._seen[event.rollout.step]
            if len(seen) < self._logging.completions and (one := completion_of(event.rollout)) is not None:
                seen.append(one)
        elif kind == "step":
            completions = self._seen.pop(event.step.step, [])
            for earlier in [step for step in self._seen if step < event.step.step]:
                del self._seen[earlier]
            if self._logging.every:
                self._since.append(progress.metrics)
            if self._logging.due(event.step.step):
                super().event(event, replace(progress, metrics=_over(self._since)))
                self._since = []
                for one in completions:
                    # A prompt of tokens is no text here.
                    prompt = f"{_short(one.prompt)!r} -> " if one.prompt else ""
                    self.say(f"  reward {one.reward:.3f}  {prompt}{_short(one.answer)!r}")
        else:
            super().event(event, progress)

    def _completion(self, at_ms: float, progress: Progress) -> None:
        """None but those that the script asks for."""

    def _print(self, at_ms: float | None, line: str) -> None:
        super()._print(at_ms, self._in_words(line))


def _over(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several steps as those of one."""
    over: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name == LEARNING_RATE:
            over[name] = values[-1]
        else:
            over[name] = max(values) if name.endswith(("/max", "_max")) else fmean(values)
    return over


def _short(text: str) -> str:
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"
