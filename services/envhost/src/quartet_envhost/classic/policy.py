"""The model as classic Verifiers sees it: a `vf.Client` whose answers come from a Sampler.

1. Tokens in, tokens out: a later turn is asked for with the exact tokens of the longest earlier step that its
   prompt extends, and the new messages as tail.
2. Every answer is kept as a Turn; a step of the trajectory finds its turn by the response it holds.
3. What the environment says of the chat template (`chat_template_kwargs`) wins, key by key, over the request.
4. What fails is one of Verifiers' own errors: it ends this rollout and is recorded, nothing else.
"""

from __future__ import annotations

import json
import time
from typing import Any

import verifiers as vf
from quartet.errors import QuartetError
from quartet.v1 import common_pb2, envhost_service_pb2, inference_service_pb2
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from quartet_envhost.sampler import (
    FINISH,
    TEMPLATE,
    Sampler,
    Turn,
    ask_for_experts,
    sampling_of,
    session_of,
    settings_of,
    turn_seed,
)
from quartet_envhost.samples import SampledTurn, learned


class PolicyError(vf.ModelError):  # type: ignore[misc]
    """The policy did not answer."""

    def __init__(self, refusal: QuartetError) -> None:
        """Say what happened."""
        super().__init__(str(refusal))
        self.refusal = refusal


class RolloutPolicy(vf.Client):  # type: ignore[misc]
    """The policy of one attempt of one member. Environments call `get_response` alone."""

    def __init__(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest, deadline: float
    ) -> None:
        """`request` has exactly one member; `deadline` is on the monotonic clock."""
        super().__init__(self)
        self._sampler = sampler
        self._request = request
        self._deadline = deadline
        self._calls = 0
        self.model_seconds = 0.0
        # The rollout's state, once it asked for a turn; whatever becomes of it is told from there.
        self.state: Any = None
        # Answered turns by the identity of the response that holds them, in the order of their end.
        self.turns: dict[int, Turn] = {}
        self._responses: list[Any] = []  # keeps them alive, so that an identity stays theirs

    async def get_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: Any = None, **kwargs: Any
    ) -> Response:
        """One turn."""
        self.state = kwargs["state"]
        started = time.monotonic()
        try:
            request = self._generate_request(prompt, sampling_args, tools)
            generated = await self._sampler.complete(
                request, lambda: [wire_message(m) for m in prompt], self._deadline - started
            )
        except QuartetError as error:
            if error.reason == "PROMPT_TOO_LONG" and self.state["trajectory"]:
                # The context is used up: the rollout ends here, truncated, and is scored as it stands.
                raise vf.OverlongPromptError(str(error)) from error
            raise PolicyError(error) from error
        finally:
            self.model_seconds += time.monotonic() - started
        turn = Turn.of(generated, next(reversed(self.turns.values()), None))
        response = _response(turn, model)
        self.turns[id(response)] = turn
        self._responses.append(response)
        return response

    def committed(self) -> list[SampledTurn]:
        """The turns that the environment took into its trajectory, in its order; what a step masks of its
        completion is not learned."""
        steps = self.state["trajectory"] if self.state is not None else []
        return [
            learned(turn, (step.get("tokens") or {}).get("completion_mask", ()))
            for step in steps
            if (turn := self.turns.get(id(step["response"]))) is not None
        ]

    def _generate_request(
        self, prompt: Any, sampling_args: dict[str, Any], tools: Any
    ) -> inference_service_pb2.GenerateRequest:
        wanted = self._request
        values = {**(sampling_args.get("extra_body") or {}), **sampling_args}
        request = inference_service_pb2.GenerateRequest(
            run_id=wanted.run_id,
            sampling=self._sampling(values),
            n=1,
            session_id=session_of(wanted.request_id),
            template_settings=settings_of(wanted.template_settings, values.get(TEMPLATE)),
        )
        for tool in tools or []:
            parameters = json.dumps(tool.parameters)
            request.tools.add(name=tool.name, description=tool.description, parameters_json=parameters)
        if wanted.HasField("min_policy_version"):
            request.min_policy_version = wanted.min_policy_version
        if wanted.HasField("exact_policy_version"):
            request.exact_policy_version = wanted.exact_policy_version
        earlier, tail = self._extended(prompt)
        if earlier is not None:
            request.tokens.token_ids.extend(earlier.prompt_ids)
            request.tokens.token_ids.extend(earlier.token_ids)
            request.tokens.tail_messages.extend(wire_message(m) for m in tail)
        else:
            request.messages.messages.extend(wire_message(m) for m in prompt)
        if wanted.routed_experts:
            ask_for_experts(request, self.turns.values())
        return request

    def _extended(self, prompt: Any) -> tuple[Turn | None, Any]:
        """The longest earlier step that the prompt goes on from, and the messages after it."""
        best: tuple[Turn | None, Any] = (None, prompt)
        for step in self.state["trajectory"]:
            said = [*step["prompt"], *step["completion"]]
            turn, tail = self.turns.get(id(step["response"])), prompt[len(said) :]
            longer = best[0] is None or len(tail) < len(best[1])
            appends = bool(tail) and all(message.role != "assistant" for message in tail)
            if turn is not None and longer and appends and list(prompt[: len(said)]) == said:
                best = (turn, tail)
        return best

    def _sampling(self, values: dict[str, Any]) -> common_pb2.SamplingParams:
        if values.get("max_tokens") is None and values.get("max_completion_tokens") is not None:
            values["max_tokens"] = values["max_completion_tokens"]
        params = sampling_of(values, self._request)
        if values.get("seed") is not None:
            task_index, member = self._request.task_index, self._request.members[0]
            params.seed = turn_seed(values["seed"], task_index, member, self._calls)
        self._calls += 1
        return params

    def setup_client(self, config: Any) -> Any:
        """Never called: there is no endpoint."""
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        """Never called, as the rest of this class: `get_response` is the whole road."""
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        """Never called."""
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is open."""


def _response(turn: Turn, model: str) -> Response:
    said, prompt, sampled = turn.completion.message, turn.prompt_ids, turn.token_ids
    calls = [ToolCall(id=c.id, name=c.name, arguments=c.arguments_json) for c in said.tool_calls]
    finish = FINISH.get(turn.completion.finish_reason)
    return Response(
        id="",
        created=0,
        model=model,
        usage=Usage(
            prompt_tokens=len(prompt),
            reasoning_tokens=0,
            completion_tokens=len(sampled),
            total_tokens=len(prompt) + len(sampled),
        ),
        message=ResponseMessage(
            content=said.content or None,
            reasoning_content=said.reasoning_content or None,
            tool_calls=calls or None,
            finish_reason=finish,
            is_truncated=finish == "length",
            # The lists are ours already; validating them again would copy long contexts.
            tokens=ResponseTokens.model_construct(
                prompt_ids=prompt,
                prompt_mask=[0] * len(prompt),
                completion_ids=sampled,
                completion_mask=[1] * len(sampled),
                completion_logprobs=turn.logprobs,
                routed_experts=None,
                multi_modal_data=None,
                prompt_attribution=None,
            ),
        ),
    )


def wire_message(message: Any) -> common_pb2.Message:
    """A message of Verifiers as one of the contract."""
    wire = common_pb2.Message(role=message.role)
    _put_content(wire, message.content)
    if message.role == "assistant":
        wire.reasoning_content = message.reasoning_content or ""
        for call in message.tool_calls or []:
            wire.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    elif message.role == "tool":
        wire.tool_call_id = message.tool_call_id
        wire.name = message.get("name") or ""
    return wire


def _put_content(wire: common_pb2.Message, content: Any) -> None:
    if content is None or isinstance(content, str):
        wire.content = _carried(content or "")
        return
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    other = {part["type"] for part in parts} - {"text", "image_url"}
    if other:
        text = f"messages have text and images; {', '.join(sorted(other))} is not served"
        raise PolicyError(QuartetError("INVALID_REQUEST", text, field="messages"))
    if all(part["type"] == "text" for part in parts):
        wire.content = _carried("\n".join(part["text"] for part in parts))  # as endpoints have it
        return
    for part in parts:
        if part["type"] == "text":
            wire.parts.add(text=_carried(part["text"]))
        else:
            wire.parts.add(image_url=part["image_url"]["url"])


def _carried(text: str) -> str:
    """Without half surrogate pairs, which no message can carry: a model may have a tool say what it likes."""
    return text.encode("utf-8", "replace").decode()
