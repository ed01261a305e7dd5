"""The open questions of one Interact call, in the front: what members ask, what the client answers.

1. Every question ends: with its answer, with the rollout that asked it, or with the client's side.
2. An answer is checked before it goes to a worker: what is trained on has a log-probability for each token.
3. Open questions are bounded by the members under way and by the calls that each makes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quartet.errors import QuartetError, refused
from quartet.trainable import no_logprob
from quartet.v1 import envhost_service_pb2

Tell = Callable[[envhost_service_pb2.ModelQuestion | QuartetError], None]


class Dialogue:
    """Questions out, answers in."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self._tell: Tell | None = None
        self._refusal: QuartetError | None = None
        self._open: dict[int, asyncio.Future[envhost_service_pb2.ModelAnswer]] = {}
        self._asked = 0
        self._ended = ""

    def begin(self, tell: Tell) -> None:
        """Questions go to `tell`, and what ends the call. Raises what ended it before it began."""
        if self._refusal is not None:
            raise self._refusal
        self._tell = tell

    def refuse(self, error: QuartetError) -> None:
        """End the call with an error of the client's."""
        self._refusal = error
        if self._tell is not None:
            self._tell(error)

    async def ask(self, question: envhost_service_pb2.ModelQuestion) -> envhost_service_pb2.ModelAnswer:
        """The client's answer to a worker's question, under the worker's own id of it."""
        assert self._tell is not None
        asked_as = question.call_id
        if self._ended:
            return envhost_service_pb2.ModelAnswer(call_id=asked_as, error=self._ended)
        self._asked += 1
        mine = question.call_id = self._asked
        answered: asyncio.Future[envhost_service_pb2.ModelAnswer]
        answered = self._open[mine] = asyncio.get_running_loop().create_future()
        try:
            self._tell(question)
            answer = await answered
        finally:
            del self._open[mine]
        answer.call_id = asked_as
        return answer

    def answer(self, answer: envhost_service_pb2.ModelAnswer) -> None:
        """Take the client's answer. Raises QuartetError(INVALID_REQUEST) where it is none."""
        if not 1 <= answer.call_id <= self._asked:
            raise refused("answer.call_id", answer.call_id, "nothing was asked under it")
        if not answer.error:
            tokens, logprobs = len(answer.token_ids), len(answer.logprobs)
            if not tokens:
                raise refused("answer.token_ids", tokens, "send the sampled tokens, one at least")
            if not answer.prompt_token_ids:
                raise refused("answer.prompt_token_ids", 0, "send the tokens of the whole prompt")
            if tokens != logprobs:
                raise refused("answer.logprobs", logprobs, f"send one for each of the {tokens} tokens")
            if (value := no_logprob(answer.logprobs)) is not None:  # no trainer would take the rollout
                remedy = "send log(p), a finite number that is never above 0; not its negative, nor p"
                raise refused("answer.logprobs", f"{value:g}", remedy)
            if not answer.HasField("message"):
                raise refused(
                    "answer.message", "", "send the sampled message, an empty one where it says nothing"
                )
        waiting = self._open.get(answer.call_id)
        # One that has ended since, by its deadline or its worker, or that was answered already.
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """The client answers nothing more."""
        self._ended = "the client ended its side of the call"
        for call_id, waiting in self._open.items():
            if not waiting.done():
                waiting.set_result(envhost_service_pb2.ModelAnswer(call_id=call_id, error=self._ended))
