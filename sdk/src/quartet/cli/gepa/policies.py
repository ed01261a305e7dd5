"""Policies of an optimisation: a candidate's system prompt in front of whoever answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from quartet.cli.eval.player import Player
from quartet.config import ConfigError
from quartet.kit.channel import ClientSecurity
from quartet.replicas import Replicas
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1 import inference_service_pb2 as ipb

#: One answer; a rollout's own deadline is shorter or longer than that.
ANSWER_SECONDS = 600.0


class ReplicaPolicy:
    """Our inference, asked by this process. Use as an async context manager."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        """Raises ConfigError."""
        self._replicas = Replicas(addresses, security)
        self._ids = itertools.count(1)
        #: A replica that is away may come back.
        self.fatal: ConfigError | None = None

    async def __aenter__(self) -> ReplicaPolicy:
        await self._replicas.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._replicas.__aexit__(*exc)

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        """One turn: the whole conversation, rendered. Raises QuartetError."""
        request = ipb.GenerateRequest(
            messages=ipb.MessagesPrompt(messages=question.messages),
            tools=question.tools,
            sampling=question.sampling,
            template_settings=question.template_settings,
            n=1,
            session_id=f"gepa#{next(self._ids)}",
        )
        generated = await self._replicas.complete(request, ANSWER_SECONDS)
        (said,) = generated.completions
        return pb.ModelAnswer(
            prompt_token_ids=generated.prompt_ids,
            token_ids=said.token_ids,
            logprobs=said.logprobs,
            message=said.message,
            truncated=said.finish_reason == ipb.FINISH_REASON_LENGTH,
        )


class Prompted:
    """Another policy, told `prompt` in place of the environment's system message."""

    def __init__(self, inner: Player) -> None:
        self._inner = inner
        self.prompt = ""

    @property
    def fatal(self) -> ConfigError | None:
        """Why no further question is worth asking."""
        return self._inner.fatal

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        """One turn. Raises what the inner policy raises."""
        told = pb.ModelQuestion()
        told.CopyFrom(question)
        del told.messages[:]
        if self.prompt:
            told.messages.add(role="system", content=self.prompt)
        told.messages.extend(one for at, one in enumerate(question.messages) if at or one.role != "system")
        return await self._inner(told)


async def ask(policy: Player, text: str, max_tokens: int) -> pb.ModelAnswer:
    """One question and its answer, outside any environment."""
    question = pb.ModelQuestion(
        messages=[common_pb2.Message(role="user", content=text)],
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
    )
    return await policy(question)
