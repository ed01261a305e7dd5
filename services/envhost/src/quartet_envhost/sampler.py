"""Where a rollout's turns are sampled: by the inference tier, or by the client of an Interact call.

Runs in workers. Every adapter reaches its model through `Sampler`.

1. A question carries the exact tokens of the earlier turns; an answer tells its whole prompt, its tokens and
   the version of each.
2. Where a chat template leaves no way to append to tokens, the whole conversation is rendered instead.
3. A conversation that fits into no message is PROMPT_TOO_LONG, as one that fits into no context.
4. A turn that was answered holds no message that came with it: a part of one holds all of it, prompt and all.
5. A turn that may be learned from is sampled at the temperature that the request says, where it says one: the
   loss reads one for all.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from quartet import experts
from quartet.errors import QuartetError, refused
from quartet.inference import NO_EXTENSION
from quartet.kit import tracing
from quartet.replicas import Completion, Generated, Replicas
from quartet.template_settings import overlaid
from quartet.v1 import common_pb2, envhost_service_pb2, inference_service_pb2, rollout_pb2

from quartet_envhost.frames import MAX_MESSAGE_BYTES
from quartet_envhost.joining import FirstTurn

# The whole conversation of a turn, rendered only where it is needed.
Conversation = Callable[[], Sequence[common_pb2.Message]]
# What the model is called inside Verifiers; which weights answer is the request's matter.
MODEL_NAME: Final = "policy"
FINISH: Final = {
    inference_service_pb2.FINISH_REASON_STOP: "stop",
    inference_service_pb2.FINISH_REASON_LENGTH: "length",
    inference_service_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
# Sampling fields that go on as they are; the rest of a SamplingConfig is for other providers.
SCALARS: Final = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
# Reasons for which a turn has no answer that another try may have.
RETRYABLE: Final = {"OVERLOADED", "NOT_READY", "DEADLINE", "INTERNAL", "VERSION_UNAVAILABLE"}
# What Verifiers, as vLLM does, calls variables of the chat template among what a turn is sampled with.
TEMPLATE: Final = "chat_template_kwargs"
# How often an environment's own temperature gave way: it is said once.
_gave_way: Final = itertools.count()
# A request_id that says a number, and which attempt it is (envhost_service.proto).
_NUMBERED: Final = re.compile(r"(.+)-([0-9]{1,17})/([0-9]{1,17})-[^/]*")

log = structlog.get_logger()


def sampling_values(params: common_pb2.SamplingParams) -> dict[str, Any]:
    """A request's sampling by the names of Verifiers, those that are set."""
    values = {name: getattr(params, name) for name in (*SCALARS[:-1], "seed") if params.HasField(name)}
    if params.ignore_eos:
        values["ignore_eos"] = True
    if params.stop:
        values["stop"] = list(params.stop)
    if params.stop_token_ids:
        values["stop_token_ids"] = list(params.stop_token_ids)
    return values


def sampling_of(
    values: Mapping[str, Any], request: envhost_service_pb2.RunRolloutsRequest, *, learned: bool = True
) -> common_pb2.SamplingParams:
    """What is said by the names of Verifiers, and of what a request wants that which has none, and the
    temperature of what may be `learned` from. Its seed is left to whoever asks."""
    wanted = request.sampling
    known = {name: values[name] for name in SCALARS if values.get(name) is not None}
    if known.get("top_k") == -1:  # as vLLM says that all are kept
        del known["top_k"]
    stop = values.get("stop") or ()
    params = common_pb2.SamplingParams(
        **known,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=values.get("stop_token_ids"),
    )
    if wanted.HasField("structure"):
        params.structure.CopyFrom(wanted.structure)
    if learned and wanted.HasField("temperature"):
        if params.HasField("temperature") and params.temperature != wanted.temperature:
            _say_gave_way(request.environment.id, params.temperature, wanted.temperature)
        params.temperature = wanted.temperature
    return params


def _say_gave_way(env_id: str, own: float, wanted: float) -> None:
    if not next(_gave_way):
        log.warning("the environment's own temperature gives way", env_id=env_id, own=own, wanted=wanted)


def settings_of(chosen: str, own: object) -> str:
    """Variables of the chat template as a request chose them, under those that the environment says itself.

    Errors: INVALID_REQUEST.
    """
    try:
        return overlaid(chosen, own)
    except ValueError as error:
        raise refused(TEMPLATE, own, str(error)) from error


@dataclass
class Turn:
    """One model call that was answered whole."""

    prompt_ids: list[int]
    completion: Completion

    @classmethod
    def of(cls, generated: Generated, before: Turn | None = None) -> Turn:
        """The one completion of an answer, with as many of its experts as a message can hold.

        It shares the tokens of the turn before it where it goes on from that: in long conversations they are
        most of what a worker holds.
        """
        (completion,) = generated.completions
        told = completion.experts
        if told is not None and len(told.numbers) > MAX_MESSAGE_BYTES:
            completion.experts = experts.joined([told], told.start, MAX_MESSAGE_BYTES)
        prompt_ids = generated.prompt_ids
        if before is not None:
            whole = before.prompt_ids + before.token_ids
            if prompt_ids[: len(whole)] == whole:
                prompt_ids = whole + prompt_ids[len(whole) :]
        return cls(prompt_ids, completion)

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> list[float]:
        """The sampler's log-probability of each token."""
        return self.completion.logprobs

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(start, length, policy version), counted from the first sampled token."""
        return self.completion.spans

    @property
    def experts(self) -> rollout_pb2.RoutedExperts | None:
        """Which experts took the tokens, as far as it was told."""
        return self.completion.experts


def account(rollout: rollout_pb2.Rollout, turns: Iterable[Turn]) -> None:
    """Tell what turns of a rollout took, and which weights answered them, on which replicas."""
    weights: set[tuple[int, int]] = set()
    replicas: set[str] = set()
    for turn in turns:
        rollout.usage.prompt_tokens += len(turn.prompt_ids)
        rollout.usage.completion_tokens += len(turn.token_ids)
        rollout.usage.cached_tokens += turn.completion.usage.cached_tokens
        weights |= turn.completion.weights
        replicas |= turn.completion.replicas
    for version, weights_id in sorted(weights):
        rollout.weights.add(policy_version=version, weights_id=weights_id)
    rollout.replicas.extend(sorted(replicas))


def ask_for_experts(request: inference_service_pb2.GenerateRequest, turns: Iterable[Turn]) -> None:
    """From the token on that was sampled last, which nothing was computed on yet.

    Not where it is beyond what the rollout's message can hold, by what the rollout's turns told.
    """
    start = max(0, len(request.tokens.token_ids) - 1)
    row = max((experts.row_bytes(turn.experts) for turn in turns if turn.experts is not None), default=0)
    if start * row <= MAX_MESSAGE_BYTES:
        request.experts_from = start


def session_of(request_id: str) -> str:
    """GenerateRequest.session_id of all members of a group, which share its prompt; numbered (see
    quartet.replicas.choice) where the request_id is. Another attempt goes mostly to another replica."""
    numbered = _NUMBERED.fullmatch(request_id)
    if numbered is None:
        return request_id
    series, number, attempt = numbered.groups()
    return f"{series}#{int(number) + int(attempt)}"


class Sampler(Protocol):
    """Answers the model calls of rollouts."""

    async def complete(
        self, request: inference_service_pb2.GenerateRequest, whole: Conversation, timeout_s: float
    ) -> Generated:
        """One turn; `whole` is what the request's prompt says, as messages. Raises QuartetError."""
        ...


class ReplicaSampler:
    """The inference tier, for one member of a group."""

    def __init__(self, replicas: Replicas, first: FirstTurn) -> None:
        """Ask these replicas; `first` is the member's share in what its group asks first."""
        self._replicas = replicas
        self._first = first
        # Turns may be asked for by tasks that know nothing of the rollout.
        self._place = tracing.here()

    async def complete(
        self, request: inference_service_pb2.GenerateRequest, whole: Conversation, timeout_s: float
    ) -> Generated:
        """Exact tokens first; the whole conversation where its template leaves no way to append to them."""
        _check_fits(request)
        with tracing.span("turn", within=self._place):
            return await self._complete(request, whole, timeout_s)

    async def _complete(
        self, request: inference_service_pb2.GenerateRequest, whole: Conversation, timeout_s: float
    ) -> Generated:
        if self._first.pending and not request.tokens.tail_messages:
            return await self._first.complete(request, timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            return await self._replicas.complete(request, timeout_s)
        except QuartetError as error:
            if error.metadata.get("field") != NO_EXTENSION:
                raise
        request.messages.CopyFrom(inference_service_pb2.MessagesPrompt(messages=whole()))
        if request.HasField("experts_from"):
            request.experts_from = 0
        _check_fits(request)
        return await self._replicas.complete(request, deadline - loop.time())


class ClientSampler:
    """The client of an Interact call, asked through the front."""

    def __init__(self, member: int, send: Callable[[bytes], None]) -> None:
        """`send` carries a ModelQuestion to the front; `take` is called with each ModelAnswer."""
        self._member = member
        self._send = send
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[envhost_service_pb2.ModelAnswer]] = {}

    async def complete(
        self, request: inference_service_pb2.GenerateRequest, whole: Conversation, timeout_s: float
    ) -> Generated:
        """Ask, and wait for the answer; the rollout's deadline bounds the wait."""
        messages = whole()
        prefix = request.tokens.token_ids
        question = envhost_service_pb2.ModelQuestion(
            call_id=next(self._ids),
            member=self._member,
            messages=messages,
            tools=request.tools,
            prefix_token_ids=prefix,
            prefix_messages=len(messages) - len(request.tokens.tail_messages) if prefix else 0,
            sampling=request.sampling,
            template_settings=request.template_settings,
        )
        _check_fits(question)
        answered = self._open[question.call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(question.SerializeToString())
            answer = await answered
        finally:
            del self._open[question.call_id]
        if answer.error:
            raise QuartetError("INVALID_REQUEST", f"the client did not sample the turn: {answer.error}")
        return _generated(answer, list(prefix))

    def take(self, answer: envhost_service_pb2.ModelAnswer) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        waiting = self._open.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


def _check_fits(asked: inference_service_pb2.GenerateRequest | envhost_service_pb2.ModelQuestion) -> None:
    """Errors: PROMPT_TOO_LONG."""
    if (size := asked.ByteSize()) > MAX_MESSAGE_BYTES:
        raise QuartetError("PROMPT_TOO_LONG", f"the conversation has {size} bytes; messages have 4 MiB")


def _generated(answer: envhost_service_pb2.ModelAnswer, prefix: list[int]) -> Generated:
    message = common_pb2.Message()
    message.CopyFrom(answer.message)
    message.role = "assistant"
    reason = inference_service_pb2.FINISH_REASON_STOP
    if answer.truncated:
        reason = inference_service_pb2.FINISH_REASON_LENGTH
    elif message.tool_calls:
        reason = inference_service_pb2.FINISH_REASON_TOOL_CALLS
    prompt_ids, token_ids = list(answer.prompt_token_ids), list(answer.token_ids)
    completion = Completion(
        token_ids=token_ids,
        logprobs=list(answer.logprobs),
        spans=[(0, len(token_ids), answer.policy_version)],
        finish_reason=reason,
        message=message,
        usage=common_pb2.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids)),
    )
    return Generated(prompt_ids, prompt_ids[: len(prefix)] == prefix, [completion])


def turn_seed(seed: int, task_index: int, member: int, turn: int) -> int:
    """A seed for one turn: equal arguments give equal seeds, any difference another one."""
    digest = hashlib.blake2b(struct.pack("<QQQQ", seed, task_index, member, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
