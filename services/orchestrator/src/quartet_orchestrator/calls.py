"""Calls: the one list of mutating calls that a run makes to its trainer.

  seq 1                        PublishWeights           version 0, what the first rollouts are sampled with
  then for s = 0, 1, ...       ForwardBackward          mini-batch  } for each mini-batch of batch s,
                               OptimStep                            } and that num_iterations times
                               PublishWeights           the version of s + 1 steps
                               SaveState                where (s + 1) is a multiple of the interval
  after the last step          SaveState(export)        always, instead of the plain one; of a run that was
                                                        extended also after each step that was the last before

1. The list follows from max_steps, those before it, num_iterations, num_minibatches, interval, keep_last and
   keep_interval, and what these three were before, alone, so both sides agree on every number after any
   restart. A longer run's list begins with the shorter one's, and one that saves otherwise from a step on
   with what was before.
2. Numbers are contiguous from 1. With max_steps 0 the list is PublishWeights, SaveState(export).
3. Saved states take `keep_last` names in turn: a state replaces the oldest one, atomically, on the trainer's
   side. The first ones of a run that saves otherwise may replace a newer one.
4. Those after a multiple of keep_interval are to be kept by the trainer, and have a name of their own:
   `step-40`. One that is the last is `final` all the same, and kept.

Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from quartet.run.config import RunConfig


class CallKind(Enum):
    """What a call asks of the trainer; the value is the RPC's name."""

    PUBLISH = "PublishWeights"
    FORWARD_BACKWARD = "ForwardBackward"
    OPTIM_STEP = "OptimStep"
    SAVE = "SaveState"


@dataclass(frozen=True)
class Saving:
    """When states are saved, how many names they take in turn, and which are kept (0: none), of the steps up
    to `until` that come after those of the Saving before it."""

    until: float
    interval: int
    keep_last: int
    keep_interval: int = 0

    def keeps(self, steps: int) -> bool:
        """Whether the state after so many steps is to be kept."""
        return self.keep_interval > 0 and steps % self.keep_interval == 0


@dataclass(frozen=True)
class Call:
    """One entry of a run's list."""

    seq_id: int
    kind: CallKind
    # The batch that it belongs to; -1 for the first publication.
    batch: int
    # Which pass over the batch, and which part of it, from 0.
    iteration: int = 0
    minibatch: int = 0
    # SaveState: name of the state, whether the model is exported, and whether the state is to be kept.
    state_name: str = ""
    export_model: bool = False
    keep: bool = False


class CallPlan:
    """A run's list of calls."""

    def __init__(
        self,
        *,
        max_steps: int,
        earlier_ends: Sequence[int] = (),
        save_interval: int,
        keep_last: int,
        keep_interval: int = 0,
        earlier_saving: Sequence[Saving] = (),
        num_iterations: int = 1,
        num_minibatches: int = 1,
    ) -> None:
        self._saving = [*earlier_saving, Saving(math.inf, save_interval, keep_last, keep_interval)]
        assert max_steps >= 0 and all(one.interval > 0 and one.keep_last > 0 for one in self._saving)
        assert num_iterations > 0 and num_minibatches > 0
        self._num_minibatches = num_minibatches
        # Two calls for each mini-batch of each pass, and the publication.
        self._calls_per_step = 2 * num_iterations * num_minibatches + 1
        self._max_steps = max_steps
        # The steps after which the model is exported, ascending; and those earlier ones that the interval
        # leaves out.
        self._ends = (*earlier_ends, max_steps)
        self._between = [end for end in earlier_ends if not self._is_due(end)]

    @classmethod
    def of(
        cls, config: RunConfig, earlier_ends: Sequence[int], earlier_saving: Sequence[Saving] = ()
    ) -> CallPlan:
        """The list that follows from a run's configuration, and from the max_steps that it had before, and
        when it saved before."""
        return cls(
            max_steps=config.max_steps,
            earlier_ends=earlier_ends,
            save_interval=config.ckpt.interval,
            keep_last=config.ckpt.keep_last,
            keep_interval=config.ckpt.keep_interval or 0,
            earlier_saving=earlier_saving,
            num_iterations=config.algorithm.num_iterations,
            num_minibatches=config.algorithm.num_minibatches,
        )

    def covered_steps(self, applied_seq_id: int) -> int:
        """The steps that each of the `keep_last` newest states contains, once so many calls are answered; 0
        while there are fewer."""
        done = bisect_right(
            range(1, self._max_steps), applied_seq_id, key=lambda steps: self.last_of(steps - 1)
        )
        # As the trainer does: an equal name is replaced, and the newest are kept.
        kept: dict[str, int] = {}
        for steps in sorted({*self._due(done), *(end for end in self._ends[:-1] if end <= done)}):
            kept.pop(self._state_name(steps - 1), None)
            kept[self._state_name(steps - 1)] = steps
            kept = dict(list(kept.items())[-self._saving_of(steps).keep_last :])
        return 0 if len(kept) < self._saving[-1].keep_last else min(kept.values())

    def first_of(self, batch: int) -> int:
        """seq_id of the batch's first ForwardBackward."""
        saved = self._due_until(batch) + bisect_right(self._between, batch)
        return 2 + self._calls_per_step * batch + saved

    def published_by(self, batch: int) -> int:
        """seq_id of the PublishWeights after the batch; batch -1 is the start."""
        return self.first_of(batch) + self._calls_per_step - 1 if batch >= 0 else 1

    def last_of(self, batch: int) -> int:
        """The last call that belongs to the batch; batch -1 is the start."""
        return self.published_by(batch) + (1 if self._saves(batch) else 0)

    def call(self, seq_id: int) -> Call:
        """The call with that number, which has to be on the list."""
        assert 1 <= seq_id <= self.last_of(self._max_steps - 1), seq_id
        if seq_id == 1:
            return Call(1, CallKind.PUBLISH, -1)
        batch = bisect_right(range(self._max_steps), seq_id, key=self.first_of) - 1
        offset = seq_id - self.first_of(batch) if batch >= 0 else self._calls_per_step
        if offset < self._calls_per_step - 1:
            kind = CallKind.OPTIM_STEP if offset % 2 else CallKind.FORWARD_BACKWARD
            return Call(seq_id, kind, batch, *divmod(offset // 2, self._num_minibatches))
        if offset == self._calls_per_step - 1:
            return Call(seq_id, CallKind.PUBLISH, batch)
        steps = batch + 1
        return Call(
            seq_id,
            CallKind.SAVE,
            batch,
            state_name=self._state_name(batch),
            export_model=steps in self._ends,
            keep=self._saving_of(steps).keeps(steps),
        )

    def version_by(self, call: Call) -> int:
        """The optimizer steps that the run has taken once the call is answered."""
        before = call.batch * (self._calls_per_step // 2)
        if call.kind != CallKind.FORWARD_BACKWARD and call.kind != CallKind.OPTIM_STEP:
            return before + self._calls_per_step // 2
        passed = call.iteration * self._num_minibatches + call.minibatch
        return before + passed + (call.kind == CallKind.OPTIM_STEP)

    def _saves(self, batch: int) -> bool:
        return self._is_due(batch + 1) or batch + 1 in self._ends

    def _saving_of(self, steps: int) -> Saving:
        """What holds of the state after so many steps."""
        return next(one for one in self._saving if steps <= one.until)

    def _is_due(self, steps: int) -> bool:
        return steps > 0 and steps % self._saving_of(steps).interval == 0

    def _due(self, last: int) -> Iterator[int]:
        """Those of the first so many steps after which a state is due."""
        before = 0
        for one in self._saving:
            until = int(min(one.until, last))
            yield from range((before // one.interval + 1) * one.interval, until + 1, one.interval)
            before = max(before, until)

    def _due_until(self, steps: int) -> int:
        """How many states are due after at most so many steps."""
        before, found = 0, 0
        for one in self._saving:
            until = max(before, int(min(one.until, steps)))
            found += until // one.interval - before // one.interval
            before = until
        return found

    def _state_name(self, batch: int) -> str:
        steps = batch + 1
        if steps in self._ends:
            return "final"
        saving = self._saving_of(steps)
        if saving.keeps(steps):
            return f"step-{steps}"
        return f"state-{steps // saving.interval % saving.keep_last}"
