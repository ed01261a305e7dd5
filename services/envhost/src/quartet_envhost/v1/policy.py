"""The model as Verifiers sees it: a Client whose answers come from InferenceService.Generate.

1. Tokens in, tokens out: a later turn is asked for with the exact tokens of the earlier ones and the new
   messages as tail; nothing that was sampled is rendered or tokenized again.
2. Every answer is kept as a Turn with its prompt, tokens, log-probabilities and the policy version of each
   token.
3. A seed in the request becomes one per (task, member, turn), so equal requests draw equal tokens and
   members differ.
4. A refused or torn call is tried again while its reason says that it may help, until the rollout's own
   deadline; tokens of a torn answer are dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from quartet.errors import QuartetError
from quartet.kit.call import stream
from quartet.kit.channel import ClientSecurity, connect
from quartet.v1 import common_pb2, envhost_service_pb2, inference_service_pb2
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from verifiers.v1.clients.client import Client
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import (
    AssistantMessage,
    Response,
    SamplingConfig,
    Tool,
    ToolCall,
    TurnTokens,
    Usage,
    content_text,
)

# Heartbeats come every 5 s; three missed ones are a dead peer.
IDLE_TIMEOUT_S: Final = 20.0
# Full-jitter backoff of refused calls; a restarted replica is asked again within a second or two.
BACKOFF_BASE_S: Final = 0.1
BACKOFF_CAP_S: Final = 2.0
# With the cap above about ten minutes: the deadline of the rollout ends it sooner.
MAX_ATTEMPTS: Final = 300

# DEADLINE while our own has not passed is a silent peer.
_RETRIED = {"NOT_READY", "OVERLOADED", "DEADLINE"}
_STATUS = {
    "OVERLOADED": 429,
    "NOT_READY": 503,
    "DEADLINE": 504,
    "INTERNAL": 502,
    "VERSION_UNAVAILABLE": 503,
    "RUN_NOT_SERVED": 404,
    "UNAUTHENTICATED": 401,
}
_FINISH = {
    inference_service_pb2.FINISH_REASON_STOP: "stop",
    inference_service_pb2.FINISH_REASON_LENGTH: "length",
    inference_service_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
# Sampling fields that go on as they are; the rest of a SamplingConfig is for other providers.
_SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


@dataclass
class Turn:
    """One model call that was answered whole."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # (start, length, policy version), counted from the first sampled token.
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    cached_tokens: int = 0


class Inference:
    """Channels to the replicas, shared by every rollout of the worker."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        """Connect lazily to each address."""
        self._channels = [connect(address, security=security) for address in addresses]
        make_stub: Any = InferenceServiceStub  # Generated code has no annotations.
        self._stubs = [make_stub(channel) for channel in self._channels]

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, request: inference_service_pb2.GenerateRequest, deadline: float
    ) -> tuple[Turn, inference_service_pb2.GenerateFinish]:
        """The completion of a request with n = 1. Raises QuartetError."""
        home = zlib.crc32(request.session_id.encode()) % len(self._stubs)
        for attempt in range(MAX_ATTEMPTS):
            # The home replica holds the prefix; others are asked only while it refuses.
            stub = self._stubs[(home + attempt) % len(self._stubs)]
            try:
                return await self._once(stub, request, max(0.001, deadline - time.monotonic()))
            except QuartetError as error:
                if error.reason not in _RETRIED:
                    raise
                pause = random.uniform(0, min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2**attempt))
                if time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
        raise QuartetError("NOT_READY", f"inference refused the call {MAX_ATTEMPTS} times")

    async def _once(
        self, stub: Any, request: inference_service_pb2.GenerateRequest, timeout_s: float
    ) -> tuple[Turn, inference_service_pb2.GenerateFinish]:
        turn = Turn(prompt_ids=list(request.tokens.token_ids))
        finish: inference_service_pb2.GenerateFinish | None = None
        call: grpc.aio.UnaryStreamCall[Any, Any] = stub.Generate(request, timeout=timeout_s)
        async for frame in stream(call, idle_timeout_s=IDLE_TIMEOUT_S):
            which = frame.WhichOneof("frame")
            if which == "delta":
                turn.token_ids.extend(frame.delta.token_ids)
                turn.logprobs.extend(frame.delta.logprobs)
                turn.spans.extend((s.start, s.length, s.policy_version) for s in frame.delta.spans)
            elif which == "start" and frame.start.prompt_token_ids:
                turn.prompt_ids = list(frame.start.prompt_token_ids)
            elif which == "finish":
                finish = frame.finish
        if finish is None:
            raise QuartetError("NOT_READY", "the answer of inference ended before its last frame")
        turn.cached_tokens = finish.usage.cached_tokens
        _check(turn)
        return turn, finish


def _check(turn: Turn) -> None:
    sampled = len(turn.token_ids)
    if not turn.prompt_ids:
        raise QuartetError("INTERNAL", "inference sent no prompt tokens")
    if len(turn.logprobs) != sampled:
        raise QuartetError(
            "INTERNAL", f"inference sent {len(turn.logprobs)} log-probabilities for {sampled} tokens"
        )
    at = 0
    for start, length, _ in turn.spans:
        if start != at or length < 1:
            raise QuartetError("INTERNAL", f"inference sent a span at {start} where {at} comes next")
        at += length
    if at != sampled:
        raise QuartetError("INTERNAL", f"inference stamped {at} of {sampled} tokens with a version")


class RolloutPolicy(Client):  # type: ignore[misc]
    """The policy of one attempt of one member."""

    def __init__(
        self, inference: Inference, request: envhost_service_pb2.RunRolloutsRequest, deadline: float
    ) -> None:
        """`request` has exactly one member; `deadline` is on the monotonic clock."""
        self._inference = inference
        self._request = request
        self._deadline = deadline
        self._calls = 0
        self.model_seconds = 0.0
        # Answered turns by trace id, in the order of their end.
        self.turns: dict[str, list[Turn]] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One turn; called by Verifiers' own request handler."""
        if not isinstance(dialect, ChatDialect) or turn is None:
            raise ProviderError("this host serves the chat-completions dialect only", status_code=400)
        request = self._generate_request(sampling, turn)
        started = time.monotonic()
        try:
            answer, finish = await self._inference.generate(request, self._deadline)
        except QuartetError as error:
            raise ProviderError(str(error), status_code=_STATUS.get(error.reason, 400)) from error
        finally:
            self.model_seconds += time.monotonic() - started
        prefix = request.tokens.token_ids
        kept = bool(prefix) and answer.prompt_ids[: len(prefix)] == list(prefix)
        self.turns.setdefault(turn.trace.id, []).append(answer)
        response = _response(answer, finish, body["model"], bridged=kept)
        response.raw = serialize_completion(response, body["model"])
        return response

    def _generate_request(
        self, sampling: SamplingConfig, turn: PendingTurn
    ) -> inference_service_pb2.GenerateRequest:
        wanted = self._request
        request = inference_service_pb2.GenerateRequest(
            run_id=wanted.run_id,
            sampling=self._sampling(sampling),
            n=1,
            # One group shares its prompt, hence one id for all its members.
            session_id=wanted.request_id,
        )
        for tool in turn.tools:
            request.tools.append(_tool(tool))
        if wanted.HasField("min_policy_version"):
            request.min_policy_version = wanted.min_policy_version
        if wanted.HasField("exact_policy_version"):
            request.exact_policy_version = wanted.exact_policy_version
        earlier = turn.previous_renderer_token_ids()
        if earlier is not None and turn.tail and all(m.role != "assistant" for m in turn.tail):
            request.tokens.token_ids.extend(earlier[0])
            request.tokens.token_ids.extend(earlier[1])
            request.tokens.tail_messages.extend(_message(m) for m in turn.tail)
        else:
            request.messages.messages.extend(_message(m) for m in turn.prompt)
        return request

    def _sampling(self, sampling: SamplingConfig) -> common_pb2.SamplingParams:
        values = sampling.model_dump(exclude_none=True)
        params = common_pb2.SamplingParams(**{name: values[name] for name in _SCALARS if name in values})
        stop = values.get("stop", [])
        params.stop.extend([stop] if isinstance(stop, str) else stop)
        params.stop_token_ids.extend(values.get("stop_token_ids", []))
        if "seed" in values:
            params.seed = turn_seed(
                values["seed"], self._request.task_index, self._request.members[0], self._calls
            )
        self._calls += 1
        return params


def turn_seed(seed: int, task_index: int, member: int, turn: int) -> int:
    """A seed for one turn: equal arguments give equal seeds, any difference another one."""
    digest = hashlib.blake2b(struct.pack("<QQQQ", seed, task_index, member, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_config(params: common_pb2.SamplingParams) -> SamplingConfig:
    """The request's sampling as Verifiers carries it; an agent's own settings are merged over it."""
    values: dict[str, Any] = {
        name: getattr(params, name) for name in (*_SCALARS[:-1], "seed") if params.HasField(name)
    }
    if params.ignore_eos:
        values["ignore_eos"] = True
    if params.stop:
        values["stop"] = list(params.stop)
    if params.stop_token_ids:
        values["stop_token_ids"] = list(params.stop_token_ids)
    return SamplingConfig(**values)


def _response(
    answer: Turn, finish: inference_service_pb2.GenerateFinish, model: str, *, bridged: bool
) -> Response:
    said = finish.message
    calls = [ToolCall(id=c.id, name=c.name, arguments=c.arguments_json) for c in said.tool_calls]
    return Response(
        id="",
        created=0,
        model=model,
        message=AssistantMessage(
            content=said.content or None,
            reasoning_content=said.reasoning_content or None,
            tool_calls=calls or None,
        ),
        finish_reason=_FINISH.get(finish.finish_reason),
        usage=Usage(
            prompt_tokens=len(answer.prompt_ids) - answer.cached_tokens,
            completion_tokens=len(answer.token_ids),
            cached_input_tokens=answer.cached_tokens or None,
        ),
        # The lists are ours already; validating them again would copy long contexts.
        tokens=TurnTokens.model_construct(
            prompt_ids=answer.prompt_ids,
            renderer_prompt_ids=None,
            bridged=bridged,
            completion_ids=answer.token_ids,
            completion_logprobs=answer.logprobs,
            message_spans=None,
            is_content=None,
            mm_placeholders=None,
            mm_token_type_id_map=None,
            routed_experts=None,
            sampling_mask=None,
        ),
    )


def _message(message: Any) -> common_pb2.Message:
    """A message of Verifiers as one of the contract."""
    content = message.content
    if isinstance(content, list) and any(part.type != "text" for part in content):
        raise ProviderError("images are not served by this build; send text", status_code=400)
    wire = common_pb2.Message(role=message.role, content=content_text(content) if content else "")
    if message.role == "assistant":
        wire.reasoning_content = message.reasoning_content or ""
        for call in message.tool_calls or []:
            wire.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    elif message.role == "tool":
        wire.tool_call_id = message.tool_call_id
        wire.name = message.name or ""
    return wire


def _tool(tool: Tool) -> common_pb2.ToolDefinition:
    return common_pb2.ToolDefinition(
        name=tool.name, description=tool.description, parameters_json=json.dumps(tool.parameters)
    )


def wire_messages(messages: Sequence[Any]) -> list[common_pb2.Message]:
    """A conversation for Rollout.messages; parts that are not text are left out."""
    out = []
    for message in messages:
        if isinstance(message.content, list):
            message = message.model_copy(update={"content": content_text(message.content)})
        out.append(_message(message))
    return out
