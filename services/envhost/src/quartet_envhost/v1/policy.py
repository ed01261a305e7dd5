"""The model as Verifiers sees it: a Client whose answers come from a Sampler.

1. Tokens in, tokens out: a later turn is asked for with the exact tokens of the earlier ones and the new
   messages as tail; nothing that was sampled is rendered or tokenized again.
2. Every answer is kept as a Turn with its prompt, tokens, log-probabilities and the policy version of each
   token.
3. A seed in the request becomes one per (task, member, agent, turn), so equal requests draw equal tokens and
   members differ. Agents are told apart by the order in which they first ask.
4. What an agent says of the chat template (`chat_template_kwargs` of its sampling) wins, key by key, over the
   request.
5. An agent that is not trainable has the temperature that it says itself; any other has the request's.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.errors import QuartetError
from quartet.v1 import common_pb2, envhost_service_pb2, inference_service_pb2
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

from quartet_envhost.conversation import without_images
from quartet_envhost.sampler import (
    FINISH,
    TEMPLATE,
    Sampler,
    Turn,
    ask_for_experts,
    sampling_of,
    sampling_values,
    session_of,
    settings_of,
    turn_seed,
)
from quartet_envhost.v1.judgement import Judgement

_STATUS = {
    "OVERLOADED": 429,
    "NOT_READY": 503,
    "DEADLINE": 504,
    "INTERNAL": 502,
    "VERSION_UNAVAILABLE": 503,
    "RUN_NOT_SERVED": 404,
    "UNAUTHENTICATED": 401,
}


class RolloutPolicy(Client):  # type: ignore[misc]
    """The policy of one attempt of one member."""

    def __init__(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest, deadline: float
    ) -> None:
        """`request` has exactly one member; `deadline` is on the monotonic clock."""
        self._sampler = sampler
        self._request = request
        self._deadline = deadline
        # How many turns each trace asked for, by its id, in the order of their first ones.
        self.asked: dict[str, int] = {}
        self.model_seconds = 0.0
        # Answered turns by trace id, in the order of their end.
        self.turns: dict[str, list[Turn]] = {}
        # Why turns have no answer, by what Verifiers keeps of it; at most one for each model call.
        self.refusals: dict[str, QuartetError] = {}
        # How other errors are told (raised.py).
        self.told: dict[tuple[str, str, str | None], str] = {}
        # How far the environment's judgement came, by episode.
        self.judgements: dict[str, Judgement] = {}

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
        started = time.monotonic()
        try:
            request = self._generate_request(sampling, turn)
            generated = await self._sampler.complete(
                request, lambda: [_message(m) for m in turn.prompt], self._deadline - time.monotonic()
            )
        except QuartetError as error:
            self.refusals[str(error)] = error
            raise ProviderError(str(error), status_code=_STATUS.get(error.reason, 400)) from error
        finally:
            self.model_seconds += time.monotonic() - started
        turns = self.turns.setdefault(turn.trace.id, [])
        answer = Turn.of(generated, turns[-1] if turns else None)
        turns.append(answer)
        # A sampler that had to send the whole conversation took the tokens out of the request.
        kept = bool(request.tokens.token_ids) and generated.prefix_kept
        response = _response(answer, body["model"], bridged=kept)
        response.raw = serialize_completion(response, body["model"])
        return response

    def _generate_request(
        self, sampling: SamplingConfig, turn: PendingTurn
    ) -> inference_service_pb2.GenerateRequest:
        wanted, values = self._request, sampling.model_dump(exclude_none=True)
        request = inference_service_pb2.GenerateRequest(
            run_id=wanted.run_id,
            sampling=self._sampling(values, turn.trace),
            n=1,
            session_id=session_of(wanted.request_id),
            template_settings=settings_of(wanted.template_settings, values.get(TEMPLATE)),
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
        if wanted.routed_experts:
            ask_for_experts(request, itertools.chain.from_iterable(self.turns.values()))
        return request

    def _sampling(self, values: dict[str, Any], trace: Any) -> common_pb2.SamplingParams:
        params = sampling_of(values, self._request, learned=trace.agent.trainable)
        trace_id = trace.id
        number = self.asked.setdefault(trace_id, 0)
        if "seed" in values:
            agent = list(self.asked).index(trace_id)
            params.seed = turn_seed(
                values["seed"], self._request.task_index, self._request.members[0], agent << 32 | number
            )
        self.asked[trace_id] = number + 1
        return params


def sampling_config(params: common_pb2.SamplingParams) -> SamplingConfig:
    """The request's sampling as Verifiers carries it; an agent's own settings are merged over it."""
    return SamplingConfig(**sampling_values(params))


def _response(answer: Turn, model: str, *, bridged: bool) -> Response:
    said, cached = answer.completion.message, answer.completion.usage.cached_tokens
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
        finish_reason=FINISH.get(answer.completion.finish_reason),
        usage=Usage(
            prompt_tokens=len(answer.prompt_ids) - cached,
            completion_tokens=len(answer.token_ids),
            cached_input_tokens=cached or None,
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
    wire = common_pb2.Message(role=message.role)
    if isinstance(content, list) and any(part.type != "text" for part in content):
        for part in content:
            if part.type == "text":
                wire.parts.add(text=part.text)
            else:
                wire.parts.add(image_url=part.image_url.url)
    else:
        wire.content = content_text(content) if content else ""
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
    """A conversation for Rollout.messages."""
    return [without_images(_message(message)) for message in messages]
