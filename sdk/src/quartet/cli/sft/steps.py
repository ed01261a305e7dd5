"""The calls of a fine-tuning, from the first to the exported model.

1. Which steps are left is what the trainer says of the run (place.py, Calls). A step's line, and that of a
   measurement after it, is written before the state that it belongs to is saved: what is gone on with from a
   state has the lines of all steps up to it.
2. A run that the trainer does not take is Refused: nothing of it was run.
3. Where somebody asks for the end, it is Stopped behind the step under way: the run is closed with its state.
   A measurement under way is broken off, but for the one after the last step: what goes on measures first.
   So is the wait for a run that is opened anew (5), which has the state that the trainer saved last.
4. Every step is written down once; which of them are shown is the display's (shown.py).
5. A trainer that is away, or cannot go on (its disk is full), is waited for, for PATIENCE_SECONDS, and that
   is said; not once somebody asked for the end, and not for memory, which nobody else would give back. One
   that was started again has lost the run, which is opened at its newest state, and gone on with from there,
   up to MAX_LOSSES times without a new step between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from quartet.cli.env.installed import REFUSALS
from quartet.cli.outputs import append_line, recover_lines
from quartet.cli.sft.batches import Batching, Drawable, ends_of_passes
from quartet.cli.sft.metrics import step_line, step_row, validation_line, validation_row
from quartet.cli.sft.place import METRICS, Calls, cut_metrics
from quartet.cli.sft.requests import RUN_ID, frames, run_spec
from quartet.cli.sft.shown import Display, Remaining
from quartet.cli.sft.stopping import Stopped, unless
from quartet.cli.sft.validation import Validation
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.awake import awake_s
from quartet.kit.call import RetryBudget, unary
from quartet.run.lora import CONTRACT_KEYS
from quartet.run.sft import SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import Sample

FINAL = "final"
# The first call waits for the service to import torch and to load the model; with --resume also until it has
# read the saved state and checked it. As long as the orchestrator allows the same call.
CREATE_SECONDS = 1800.0
CALL_SECONDS = 3600.0  # the largest batch on the slowest machine
PATIENCE_SECONDS = 600.0  # as a run has it
AGAIN_SECONDS = 1.0
# A trainer that a batch kills each time will not get over it.
MAX_LOSSES = 3

T = TypeVar("T")


class Refused(ConfigError):
    """The trainer did not take the run."""


class Training:
    """A fine-tuning on a trainer."""

    def __init__(
        self,
        stub: Any,
        config: SftConfig,
        given: Drawable,
        validation: Validation,
        output: Path,
        display: Display,
    ) -> None:
        self._stub, self._config, self._given = stub, config, given
        self._validation, self._output, self._display = validation, output, display
        self._calls = Calls(validation.steps, _saves(config, given, validation.steps))
        self._remaining = Remaining(self._calls.steps)
        # The last step that has its line, and the last one behind which was measured here.
        self._written, self._measured = 0, -1
        self._asked = asyncio.Event()

    async def opened(self) -> int:
        """Open the run, or the one that was begun; how many of its steps are done. Metrics are cut to them.
        Raises Refused, QuartetError."""
        try:
            done = self._written = await self._open()
        except QuartetError as error:
            if error.reason in REFUSALS:
                named = error.metadata.get("key", "")
                told = error.message.replace(named, CONTRACT_KEYS.get(named, named), 1)
                raise Refused(told) from error
            raise
        cut_metrics(self._output, done)
        return done

    async def _open(self) -> int:
        spec = run_spec(self._config, self._calls.steps)
        create = pb.CreateRunRequest(run_id=RUN_ID, spec=spec, keep_last=self._config.ckpt.keep_last)
        created = await unary(
            self._stub.CreateRun,
            create,
            timeout_s=CREATE_SECONDS,
            budget=RetryBudget(),
            wait_for_ready=True,
        )
        done = self._calls.step_after(created.run.applied_seq_id)
        if done:
            self._display.say(f"going on after step {done}/{self._calls.steps}")
        return done

    async def finished(self, done: int, asked: asyncio.Event) -> Path:
        """Take all steps after so many. The exported model's folder. Raises Stopped once somebody asked,
        QuartetError, OSError."""
        self._asked = asked
        losses, written = 0, self._written
        while True:
            try:
                return await self._finished_from(done, asked)
            except QuartetError as error:
                losses, written = losses + 1 if written == self._written else 1, self._written
                if error.reason != "RUN_UNKNOWN":
                    raise
                if losses > MAX_LOSSES:
                    beyond = f"a step beyond {written}" if written else "a step"
                    why = f"the trainer ended {losses} times without {beyond}; its log says why"
                    raise QuartetError("INTERNAL", why) from error
            self._display.say("the trainer was started again; what it had not saved is done once more")
            try:
                done = await unless(asked, self._waited_for(self._open))
            except Stopped:
                raise Stopped(self._written or None) from None

    async def _finished_from(self, done: int, asked: asyncio.Event) -> Path:
        calls, config = self._calls, self._config
        if done < calls.steps and not self._has_measured(done):
            await self._measure_unless(asked, done)
        self._remaining.begun()
        drawn = enumerate(Batching.of(config).drawn(self._given, config.seed))
        for step, numbers in islice(drawn, done, calls.steps):
            await self._step(step, self._given.taken(numbers))
            if step + 1 == calls.steps:
                await self._measure(step + 1)
            else:
                with suppress(Stopped):  # behind its state, below
                    await self._measure_unless(asked, step + 1)
            stops = asked.is_set() and step + 1 < calls.steps
            if calls.saves_after(step):
                await self._save(calls.first_of(step) + 2, f"step-{step + 1}", step + 1)
            elif stops:
                await self._close(step)
            if stops:
                raise Stopped(step + 1)
        if done == calls.steps:
            request = pb.ListStatesRequest(run_id=RUN_ID)
            states = await self._answer(self._stub.ListStates, request)
            return Path(next(one.model_path for one in states.states if one.name == FINAL))
        return await self._save(calls.last, FINAL, calls.steps, export=True)

    async def _step(self, step: int, batch: Sequence[Sample]) -> None:
        began, seq_id = time.monotonic(), self._calls.first_of(step)
        done = await self._answer(self._stub.ForwardBackward, list(frames(batch, seq_id)))
        stepped = await self._answer(
            self._stub.OptimStep, pb.OptimStepRequest(run_id=RUN_ID, seq_id=seq_id + 1)
        )
        number, steps, seconds = step + 1, self._calls.steps, time.monotonic() - began
        if number > self._written:
            append_line(self._output / METRICS, step_row(number, done, stepped, seconds))
            self._written = number
        line = step_line(number, steps, done, stepped, seconds, self._remaining.after(number))
        self._display.step(number, line, is_news=stepped.skipped_nonfinite)

    def _has_measured(self, done: int) -> bool:
        rows = recover_lines(self._output / METRICS)
        return any(row["step"] == done and "val/loss_tokens" in row for row in rows)

    async def _measure_unless(self, asked: asyncio.Event, done: int) -> None:
        """Measure what is due; a large set takes minutes. Raises Stopped once somebody asked."""
        try:
            await unless(asked, self._measure(done))
        except Stopped:
            raise Stopped(done or None) from None

    async def _measure(self, done: int) -> None:
        """Measure the validation set, where that is due after so many steps."""
        if done <= self._measured or not self._validation.is_due(done):
            return
        began = time.monotonic()
        measured = await self._waited_for(lambda: self._validation.measured(self._stub, CALL_SECONDS))
        row = validation_row(done, measured, time.monotonic() - began)
        append_line(self._output / METRICS, row)
        self._measured = done
        self._display.say(validation_line(done, self._calls.steps, measured))

    async def _close(self, step: int) -> None:
        """Behind a step, with its state."""
        applied = self._calls.first_of(step + 1) - 1
        close = pb.CloseRunRequest(run_id=RUN_ID, save_at_seq_id=applied)
        await self._answer(self._stub.CloseRun, close)

    async def _save(self, seq_id: int, name: str, done: int, *, export: bool = False) -> Path:
        keep = self._config.ckpt.keeps(done)
        save = pb.SaveStateRequest(run_id=RUN_ID, seq_id=seq_id, name=name, export_model=export, keep=keep)
        saved = await self._answer(self._stub.SaveState, save)
        return Path(saved.state.model_path)

    async def _answer(self, method: Callable[..., Any], request: Any) -> Any:
        """The answer to a call. Raises QuartetError."""
        return await self._waited_for(lambda: unary(method, request, timeout_s=CALL_SECONDS))

    async def _waited_for(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result; tried again while the trainer is away or cannot go on."""
        since, told = math.inf, ""
        while True:
            try:
                answer = await attempt()
            except QuartetError as error:
                since = min(since, awake_s())
                ends = self._asked.is_set() or awake_s() - since > PATIENCE_SECONDS
                if error.reason != "NOT_READY" or ends:
                    raise
                stands = "is away" if "grpc_code" in error.metadata else "answers and cannot go on"
                if stands != told:
                    told = stands
                    self._display.say(f"the trainer {stands}, waiting for it: {error.message}")
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if told:
                self._display.say("the trainer is back")
            return answer


def _saves(config: SftConfig, given: Drawable, steps: int) -> Sequence[int]:
    """After which steps a plain state is saved."""
    if config.ckpt.epochs is not None:
        return ends_of_passes(config, given, steps, config.ckpt.epochs)
    return range(config.ckpt.interval, steps, config.ckpt.interval)
