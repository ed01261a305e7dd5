"""Prompts told back by /v1/completions (`echo`), with the log-probabilities of their tokens where asked for.

1. Prompt and completion are scored together once the completion has ended, as Score does it: at temperature
   1, without penalties, all by one version, whichever sampled the completion.
2. With max_tokens = 0 nothing is sampled; what a request waits for and what refuses it is the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.answering import Answerer, Ended, Started
from quartet_inference.engine import Delta, Engine, Scored, ScoreRequest
from quartet_inference.openai.bodies import CompletionBody


@dataclass(frozen=True)
class Echoed:
    """One choice with its prompt: comes before its end."""

    index: int
    tokens: tuple[int, ...]
    scored: Scored  # all tokens but the first


Part = Started | Delta | Echoed | Ended


class Echo:
    """Answers in which the prompt is told back."""

    def __init__(self, answerer: Answerer, engine: Engine, body: CompletionBody) -> None:
        self._answerer = answerer
        self._engine = engine
        self._body = body

    async def answer(self, request: pb.GenerateRequest, limit_s: float) -> AsyncIterator[Part]:
        """As of Answerer, and before the end of each choice its scores. Errors: those of Generate."""
        choices: list[list[int]] = []
        nothing = self._body.max_tokens == 0
        answer = partial(self._answerer.answer, watched=self._body.stream)
        events = self._nothing(request, limit_s) if nothing else answer(request, limit_s)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Started):
                    choices = [list(event.prompt) for _ in range(self._body.n)]
                elif isinstance(event, Delta):
                    choices[event.index].extend(event.token_ids)
                elif self._body.logprobs is not None:
                    yield await self._echoed(event.index, tuple(choices[event.index]), request)
                yield event

    async def _echoed(self, index: int, tokens: tuple[int, ...], request: pb.GenerateRequest) -> Echoed:
        covered = ((1, len(tokens) - 1),) if len(tokens) > 1 else ()
        exact = request.exact_policy_version if request.HasField("exact_policy_version") else None
        wanted = ScoreRequest(tokens, covered, request.run_id, exact, top=self._body.logprobs or 0)
        return Echoed(index, tokens, await self._engine.score(wanted))

    async def _nothing(self, request: pb.GenerateRequest, limit_s: float) -> AsyncIterator[Started | Ended]:
        prompt = await self._answerer.prompt(request, limit_s)
        yield Started(prompt, [], rendered=False, kept=True)
        for index in range(self._body.n):
            message = common_pb2.Message(role="assistant")
            yield Ended(index, pb.FINISH_REASON_LENGTH, "", "", message, len(prompt), 0, 0)
