"""The canary: do the weights in the engine compute what the trainer says that this version computes?

1. After a swap the engine scores the fixed sequence of the version's manifest, while it goes on decoding. If
   the log-probabilities disagree by more than the tolerance the gate closes: what runs fails with NOT_READY,
   nothing new begins. What fails before, as its logits are no numbers, waits for the verdict, and fails so.
2. A closed gate opens only for a version whose canary agrees. One that has none is only asked for numbers.
3. Only the newest swap counts: the check of an older one is dropped.
4. An adapter that is new here answers nobody before its canary lives: one that belongs to another base would
   be loaded for each request that names it, and answer for a few steps each time. Only a newer version of one
   that answers does so unchecked, as whole weights do.
5. The canary goes before all that waits, and no full queue keeps it out: weights answer unchecked for a few
   steps, or where vLLM runs all that it may until the first of these ends. Where it cannot be scored, as the
   device has no room for it, that is tried again after AGAIN_SECONDS, for as long as these weights are there:
   without a verdict nobody would become ready.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal, refusal
from quartet.v1 import weights_pb2 as pb
from quartet.weights.manifest import mismatch

from quartet_inference.engine import (
    Engine,
    EngineInfo,
    Event,
    NonFiniteLogits,
    Request,
    Scored,
    ScoreRequest,
    ServedWeights,
)
from quartet_inference.layout import REMEDY

#: Mean difference of a log-probability. With float32 only the order of sums differs (measured: below 1e-6);
#: with float16 and bfloat16 the engine computes in 11 or 8 bits what the trainer computed in 24 (measured on
#: sharp random models: 0.003 and 0.02), or, on an accelerator, the trainer does. One tensor that is 10 % off
#: moves it by 0.02 to 0.2.
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
#: Of safetensors, for those of TOLERANCES.
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Canary.token_ids says so.
MAX_TOKENS = 64
#: What a version without a canary is scored on, as far as the vocabulary goes.
ANY_TOKENS = range(16)
#: Whoever shares the device may have given back what was lacking by then.
AGAIN_SECONDS = 1.0
#: Runs of which is told what could not be taken, each with a sentence or two: the oldest is forgotten first.
MAX_REFUSED = 64
#: For a verdict, once a request has met what is no number; the canary goes before all else, but not past a
#: pause of decoding.
VERDICT_SECONDS = 20.0

#: Of weights that are out of service, for whoever is refused.
UNTIL = "the next version whose canary is right ends this: publish one, or ask another replica"

log = structlog.get_logger()


class Gate:
    """An engine that answers only while its weights are trusted. Everything else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._why = ""
        # By run; of "" what is about all of them.
        self._refused: dict[str, UpdateRefusal] = {}
        self._away: dict[str, UpdateRefusal] = {}
        self._verdict: Callable[[str], Awaitable[str]] | None = None
        self._is_trusted: Callable[[str], bool] = lambda run_id: True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def set_verdict(self, verdict: Callable[[str], Awaitable[str]]) -> None:
        """`verdict` waits until what answers a run was scored, and says why its adapter is dead, if it is."""
        self._verdict = verdict

    def set_trusted(self, is_trusted: Callable[[str], bool]) -> None:
        """`is_trusted` says whether a canary of a run's adapter lived: until one did it is not told of."""
        self._is_trusted = is_trusted

    def set_out_of_service(self, why: str) -> None:
        """Answer nothing more; without a reason, answer again."""
        self._why = why

    def set_update_refused(self, why: UpdateRefusal) -> None:
        """Say that what was offered last, of a run or of any, could not be taken."""
        self._refused.pop(why.run_id, None)
        while len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[why.run_id] = why

    def set_update_taken(self, run_id: str | None = None) -> None:
        """Say that what was offered last of a run was taken, or nothing is any more; or of all of them."""
        if run_id is None:
            self._refused.clear()
        self._refused.pop(run_id or "", None)

    def set_away(self, why: QuartetError | None) -> None:
        """Say that nothing is offered, as the trainer does not answer, or not for its run; without a reason,
        that it does."""
        self._away = {}
        if why is None:
            self._refused.pop("", None)  # that nothing is announced at all, as to a stranger
        else:
            of_run = why.metadata.get("run_id", "") if why.reason == "RUN_UNKNOWN" else ""
            self._away[of_run] = refusal(f"versions are not announced: {why.message}", of_run)

    def info(self) -> EngineInfo:
        """The engine's, and why it does not answer or take what it is offered."""
        refused = tuple({**self._away, **self._refused}.values())
        info = self._engine.info()
        if not (self._why or refused or info.adapters):
            return info  # several times for each request: a copy is a tenth of what a request takes
        trusted = tuple(one for one in info.adapters if self._is_trusted(one.run_id))
        return replace(info, adapters=trusted, out_of_service=self._why, update_refusals=refused)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt, for as long as the weights are trusted."""
        self._check()
        self._check_adapter(request.run_id)
        try:
            async with aclosing(self._engine.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._check()
                    yield event
        except NonFiniteLogits:
            await self._judge(request.run_id)
            raise

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a sequence."""
        self._check()
        self._check_adapter(request.run_id)
        try:
            scored = await self._engine.score(request)
        except NonFiniteLogits:
            await self._judge(request.run_id)
            raise
        self._check()
        return scored

    def _check(self) -> None:
        if self._why:
            raise QuartetError("NOT_READY", f"out of service: {self._why}; {UNTIL}")

    def _check_adapter(self, run_id: str) -> None:
        is_here = any(one.run_id == run_id for one in self._engine.info().adapters)
        if is_here and not self._is_trusted(run_id):
            raise QuartetError(
                "NOT_READY", f"the adapter of run {run_id!r} is new here, its canary not scored"
            )

    async def _judge(self, run_id: str) -> None:
        """Whether the weights that gave a request no numbers are out of service. Errors: NOT_READY."""
        if self._verdict is None:
            return
        try:
            async with asyncio.timeout(VERDICT_SECONDS):
                dead = await self._verdict(run_id)
        except TimeoutError:
            return
        self._check()
        if dead:
            raise QuartetError("NOT_READY", dead)


class CanaryWatch:
    """Checks in the background what was swapped in."""

    def __init__(self, engine: Engine, tolerance: float | None, on_verdict: Callable[[str], None]) -> None:
        """`on_verdict` is told why the weights are not to be trusted, or nothing."""
        self._engine, self._on_verdict = engine, on_verdict
        self._given_tolerance = tolerance
        self._tolerance = 0.0
        self._canary: pb.Canary | None = None
        self._published_as: Collection[str] = ()
        self._trusted = False
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None

    def swapped(
        self, weights: ServedWeights, canary: pb.Canary | None, published_as: Collection[str] = ()
    ) -> None:
        """Other weights are in the engine. `published_as`: the dtypes of their tensors."""
        self.close()
        self._published_as = published_as
        dtypes = {self._engine.info().dtype} | {NAMES[one] for one in published_as if one in NAMES}
        coarsest = max(TOLERANCES[one] for one in dtypes)
        self._tolerance = coarsest if self._given_tolerance is None else self._given_tolerance
        self._canary, self._trusted = canary, False
        self._begin(weights)

    def _begin(self, weights: ServedWeights) -> None:
        self._task = asyncio.create_task(self._judge(weights, self._canary), name="canary")
        self._task.add_done_callback(_tell_fault)

    def renamed(self, weights: ServedWeights) -> None:
        """The weights in the engine are this version's, too; unless found right they are checked again."""
        if not self._trusted:
            self.swapped(weights, self._canary, self._published_as)

    async def scored(self) -> None:
        """Wait until what is in the engine was scored, or nobody finds out for now."""
        while (task := self._task) is not None and not task.done():
            await asyncio.wait({task})

    def close(self) -> None:
        """Drop the check under way."""
        if self._task is not None:
            self._task.cancel()
        if self._again is not None:
            self._again.cancel()

    def _tell(self, why: str) -> None:
        self._trusted = not why
        self._on_verdict(why)

    async def _judge(self, weights: ServedWeights, canary: pb.Canary | None) -> None:
        info = self._engine.info()
        tokens = canary.token_ids if canary else ANY_TOKENS[: info.vocab_size]
        # Less than a whole canary fits into a very short context.
        scored = await self._scored(weights, tuple(tokens)[: info.max_model_len])
        if scored is None:
            return
        version, why = weights.version, ""
        difference = _difference(scored, canary.logprobs if canary else scored)
        if not difference <= self._tolerance:  # not a number is no agreement
            why = f"the weights of version {version} give log-probabilities that are no numbers"
            if all(map(math.isfinite, scored)):
                why = (
                    f"the weights in the engine are not those of version {version}: log-probabilities "
                    f"of its canary are {difference:.2g} off in the mean (tolerance {self._tolerance:g})"
                )
            log.error("canary died", run_id=weights.run_id, version=version, difference=difference)
        else:
            log.debug("canary lives", run_id=weights.run_id, version=version, difference=difference)
        self._tell(why)

    async def _scored(self, weights: ServedWeights, tokens: tuple[int, ...]) -> Sequence[float] | None:
        """Those of all but the first; None: not now, or as the weights changed or the engine ended."""
        request = ScoreRequest(tokens, ((1, len(tokens) - 1),), weights.run_id, weights.version, ahead=True)
        try:
            return (await self._engine.score(request)).logprobs
        except QuartetError as error:
            log.warning("canary could not be scored", version=weights.version, why=str(error))
            if error.reason == "OVERLOADED" or (error.reason != "INTERNAL" and self._are_there(weights)):
                self._again = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._begin, weights)
            return [math.inf] * (len(tokens) - 1) if error.reason == "INTERNAL" else None

    def _are_there(self, weights: ServedWeights) -> bool:
        info = self._engine.info()
        return not info.ended and weights in (info.served, *info.adapters)


def _tell_fault(task: asyncio.Task[None]) -> None:
    """At once: asyncio tells of it when the task is forgotten, and it is kept until the next swap."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the canary's check failed: without a verdict nobody becomes ready", exc_info=error)


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """In the mean; infinity less infinity is not a number."""
    return sum(abs(one - other) for one, other in zip(ours, theirs, strict=False)) / len(ours)


def check_canary(manifest: pb.WeightManifest, vocab_size: int) -> None:
    """Refuse a canary that cannot be scored. Errors: CHECKSUM_MISMATCH, INVALID_REQUEST."""
    if not manifest.HasField("canary"):
        return
    tokens = manifest.canary.token_ids
    if not (2 <= len(tokens) <= MAX_TOKENS and len(manifest.canary.logprobs) == len(tokens) - 1):
        raise mismatch("canary")
    if max(tokens) >= vocab_size:
        raise QuartetError(
            "INVALID_REQUEST",
            f"the canary has token {max(tokens)}, the model knows {vocab_size} tokens: the version is of "
            f"another model; {REMEDY}",
            field="canary",
            value=max(tokens),
            remedy=REMEDY,
        )
