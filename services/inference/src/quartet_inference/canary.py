"""The canary: do the weights in the engine compute what the trainer says that this version computes?

1. After a swap the engine scores the fixed sequence of the version's manifest, while it goes on decoding. If
   the log-probabilities disagree by more than the tolerance the gate closes: what runs fails with NOT_READY,
   nothing new begins.
2. A closed gate opens only for a version whose canary agrees, or that has none.
3. Only the newest swap counts: the check of an older one is dropped.
4. The canary goes before all that waits, and no full queue keeps it out: weights answer unchecked for a few
   steps, or where vLLM runs all that it may until the first of these ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights.manifest import mismatch

from quartet_inference.engine import Engine, EngineInfo, Event, Request, Scored, ScoreRequest, ServedWeights

#: Mean difference of a log-probability. With float32 only the order of sums differs (measured: below 1e-6);
#: with float16 and bfloat16 the engine computes in 11 or 8 bits what the trainer computed in 24 (measured on
#: sharp random models: 0.003 and 0.02), or, on an accelerator, the trainer does. One tensor that is 10 % off
#: moves it by 0.02 to 0.2.
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
#: Of safetensors, for those of TOLERANCES.
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Canary.token_ids says so.
MAX_TOKENS = 64

log = structlog.get_logger()


class Gate:
    """An engine that answers only while its weights are trusted. Everything else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._why = self._refused = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def set_out_of_service(self, why: str) -> None:
        """Answer nothing more; without a reason, answer again."""
        self._why = why

    def set_update_refused(self, why: str) -> None:
        """Say that what was offered last could not be taken; without a reason, that it was."""
        self._refused = why

    def info(self) -> EngineInfo:
        """The engine's, and why it does not answer or take what it is offered."""
        return replace(self._engine.info(), out_of_service=self._why, update_refused=self._refused)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt, for as long as the weights are trusted."""
        self._check()
        async with aclosing(self._engine.generate(request)) as events:  # type: ignore[type-var]
            async for event in events:
                self._check()
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a sequence."""
        self._check()
        scored = await self._engine.score(request)
        self._check()
        return scored

    def _check(self) -> None:
        if self._why:
            raise QuartetError("NOT_READY", f"out of service: {self._why}")


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
        if canary is None:
            self._tell("")
        else:
            self._task = asyncio.create_task(self._judge(weights, canary), name="canary")

    def renamed(self, weights: ServedWeights) -> None:
        """The weights in the engine are this version's, too; unless found right they are checked again."""
        if not self._trusted:
            self.swapped(weights, self._canary, self._published_as)

    def close(self) -> None:
        """Drop the check under way."""
        if self._task is not None:
            self._task.cancel()

    def _tell(self, why: str) -> None:
        self._trusted = not why
        self._on_verdict(why)

    async def _judge(self, weights: ServedWeights, canary: pb.Canary) -> None:
        difference = await self._difference(weights, canary)
        if difference is None:
            return
        why = ""
        if not difference <= self._tolerance:  # not a number is no agreement
            why = (
                f"the weights in the engine are not those of version {weights.version}: log-probabilities "
                f"of its canary are {difference:.2g} off in the mean (tolerance {self._tolerance:g})"
            )
            log.error("canary died", run_id=weights.run_id, version=weights.version, difference=difference)
        else:
            log.debug("canary lives", run_id=weights.run_id, version=weights.version, difference=difference)
        self._tell(why)

    async def _difference(self, weights: ServedWeights, canary: pb.Canary) -> float | None:
        """In the mean; None where the weights were changed meanwhile, or the engine ended."""
        # Less than a whole canary fits into a very short context.
        tokens = tuple(canary.token_ids)[: self._engine.info().max_model_len]
        covered = ((1, len(tokens) - 1),)
        request = ScoreRequest(tokens, covered, weights.run_id, weights.version, ahead=True)
        try:
            scored = await self._engine.score(request)
        except QuartetError as error:
            log.warning("canary could not be scored", version=weights.version, why=str(error))
            return math.inf if error.reason == "INTERNAL" else None
        pairs = zip(scored.logprobs, canary.logprobs, strict=False)
        return sum(abs(ours - theirs) for ours, theirs in pairs) / len(scored.logprobs)


def check_canary(manifest: pb.WeightManifest, vocab_size: int) -> None:
    """Refuse a canary that cannot be scored. Errors: CHECKSUM_MISMATCH."""
    canary = manifest.canary
    if manifest.HasField("canary") and not (
        2 <= len(canary.token_ids) <= MAX_TOKENS
        and len(canary.logprobs) == len(canary.token_ids) - 1
        and max(canary.token_ids) < vocab_size
    ):
        raise mismatch("canary")
