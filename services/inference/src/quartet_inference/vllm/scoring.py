"""What the weights in a vLLM engine say of given tokens: to callers, and to whoever checks the weights.

1. A score is of one version, which serves when it begins: whoever comes to other weights on the way begins
   anew.
2. `unnamed` and `experts_unnamed` ask the base weights inside, whatever these are called by now: a version is
   checked before it is served.
3. Non-finite logits have the keys behind them wiped where a caller met them. The end of vLLM's core is
   NOT_READY to whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quartet.kit.fresh import fresh_id
from vllm.lora.request import LoRARequest

from quartet_inference.engine import (
    Experts,
    NonFiniteLogits,
    Scored,
    ScoreRequest,
    ServedWeights,
    refusal,
)
from quartet_inference.vllm.adapters import Adapters
from quartet_inference.vllm.experts import RoutedExperts
from quartet_inference.vllm.flight import Rows, Submission, scored
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.workers import Workers


class Scoring:
    """By the weights and adapters of a started engine."""

    def __init__(
        self,
        running: Running,
        workers: Workers,
        experts: RoutedExperts,
        adapters: Adapters,
        on_step: Callable[[], None],
    ) -> None:
        """`on_step` is called whenever vLLM has answered."""
        self._running = running
        self._workers = workers
        self._experts = experts
        self._adapters = adapters
        self._on_step = on_step

    async def of(self, request: ScoreRequest) -> Scored:
        """Score a sequence. Errors: those of `Engine.score`."""
        self._running.admit(request, 0 if request.ahead else 1)
        if not request.covered:
            return Scored([], self._serving(request).version)
        return await self._running.score(self._running.of_core(self._by_one_version(request)))

    def _serving(self, request: ScoreRequest) -> ServedWeights:
        """What answers a request now. Errors: those of `refusal`."""
        served = self._running.info.serving(request.run_id)
        refused = refusal(request, served)
        if refused is not None:
            raise refused
        assert served is not None, "it is not refused"
        return served

    async def _by_one_version(self, request: ScoreRequest) -> Scored:
        try:
            while True:
                # Together: what was served when it was asked for may be served no more.
                served = self._serving(request)
                adapter, epoch = self._adapters.get(request.run_id), self._running.epoch
                async with self._adapters.using(adapter) as lora:
                    logprobs, tops = await self._logprobs(request, lora)
                if epoch == self._running.epoch and adapter is self._adapters.get(request.run_id):
                    return Scored(logprobs, served.version, tops)
        except NonFiniteLogits:
            self._workers.spoiled()
            raise

    async def _logprobs(self, request: ScoreRequest, lora: LoRARequest | None) -> Rows:
        async with Submission(self._running.llm, fresh_id(), self._on_step) as submission:
            vocabulary = self._running.info.vocab_size
            return await scored(submission, request, self._running.salt, lora, vocabulary)

    async def unnamed(self, request: ScoreRequest) -> list[float]:
        """The log-probabilities of what a request covers. Errors: INTERNAL, NOT_READY."""
        return (await self._running.of_core(self._logprobs(request, None)))[0]

    async def experts_unnamed(self, tokens: Sequence[int]) -> Experts | None:
        """The experts that take these tokens; None where the workers do not know. Errors: NOT_READY."""
        return await self._running.of_core(self._experts.of_prompt(tokens, self._running.salt))
