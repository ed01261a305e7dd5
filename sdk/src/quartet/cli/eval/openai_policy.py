"""An OpenAI-compatible endpoint as the policy of `EnvHostService.Interact`.

1. A turn is one chat completion: the conversation as the environment has it, with its tools and sampling.
2. An endpoint tells how many tokens there were, not which. The answer therefore carries as many zeros: they
   are counted as usage and are good for nothing else, so nothing of these rollouts is ever trained on.
3. Thinking is told by servers as `reasoning_content`, or as `reasoning` (vLLM 0.32); in later turns it goes
   back as it was told, for templates keep it while tools are called.
4. Replicas take turns; one that no connection is made to (it refuses, or its packets are dropped) is passed
   over, and asked last for REST_SECONDS. One that has the question and is silent is not.
5. An endpoint that will never answer (no connection to any replica, wrong key, unknown model) is told by
   `fatal`; any other error fails the rollout that asked, also a 403 where the endpoint has answered before.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import openai

from quartet.cli.eval.endpoints import ANSWER_SECONDS, Endpoint, EndpointConfig
from quartet.config import ConfigError
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as pb

#: An attempt to connect, in which a lost first packet is sent again after one, three and seven seconds. The
#: kernel itself gives an address that drops them up after two minutes.
CONNECT_SECONDS = 10.0
#: The client library's own, with growing pauses, for what passes: 429, 5xx, connections.
RETRIES = 3
#: How long one that was not reached is asked last: a question to it costs all of these attempts.
REST_SECONDS = 60.0
#: Sampling keys that the API does not have, but most servers take beside it, as variables of the template.
BESIDE = ("top_k", "min_p", "repetition_penalty", "min_tokens")
PLAIN = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
THINKING = ("reasoning_content", "reasoning")
HOPELESS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)


class OpenAiPolicy:
    """Asks an endpoint. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, answer_seconds: float = ANSWER_SECONDS) -> None:
        """Nothing is asked yet; each attempt at an answer may take so long. Raises ConfigError where a key is
        missing."""
        self._clients = [
            openai.AsyncOpenAI(
                base_url=one.url,
                api_key=endpoint.key_of(one),
                default_headers=one.headers,
                timeout=openai.Timeout(answer_seconds, connect=CONNECT_SECONDS),
                max_retries=RETRIES,
            )
            for one in endpoint.replicas
        ]
        self._replicas = list(zip(self._clients, endpoint.replicas, strict=True))
        self._turns = itertools.count()
        self._rests_until = [0.0] * len(self._replicas)
        self._answered = False
        # The name by which the endpoint tells thinking; empty: it has told none.
        self._thinking = ""
        #: Why no further question is worth asking.
        self.fatal: ConfigError | None = None

    async def __aenter__(self) -> OpenAiPolicy:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in self._clients:
            await client.close()

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        """One turn. Raises openai.OpenAIError."""
        messages = [wire_message(one, self._thinking) for one in question.messages]
        first, count = next(self._turns), len(self._replicas)
        in_turn = [(first + place) % count for place in range(count)]
        now = time.monotonic()
        for number in sorted(in_turn, key=lambda number: self._rests_until[number] > now):
            client, replica = self._replicas[number]
            try:
                return await self._ask(client, replica, messages, question)
            except openai.APIConnectionError as error:
                if isinstance(error, openai.APITimeoutError) and not _while_connecting(error):
                    raise
                away, why = error, str(error.__cause__ or "") or error
                self._rests_until[number] = time.monotonic() + REST_SECONDS
        if self._answered:
            raise away
        raise self._give_up(replica.url, f"cannot be reached: {why}") from away

    async def _ask(
        self,
        client: openai.AsyncOpenAI,
        replica: EndpointConfig,
        messages: list[dict[str, Any]],
        question: pb.ModelQuestion,
    ) -> pb.ModelAnswer:
        try:
            done = await client.chat.completions.create(
                model=replica.model,
                messages=messages,  # type: ignore[arg-type]
                **parameters(question),
            )
        except HOPELESS as error:
            if self._answered and isinstance(error, openai.PermissionDeniedError):
                raise  # of this text: so is refused what a moderation flags
            raise self._give_up(replica.url, f"refuses: {_reason(error)}") from error
        self._answered = True
        answer = answer_of(done)
        if answer.message.reasoning_content:
            self._thinking = next(name for name in THINKING if getattr(done.choices[0].message, name, None))
        return answer

    def _give_up(self, url: str, why: str) -> ConfigError:
        self.fatal = ConfigError(f"the endpoint {url} {why}; check its url, key and model")
        return self.fatal


def _while_connecting(error: openai.APITimeoutError) -> bool:
    """Whether nobody has got the question. The HTTP library below is another one from openai 3 on."""
    return type(error.__cause__).__name__ == "ConnectTimeout"


def _reason(error: openai.APIStatusError) -> str:
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    return f"{error.status_code} {said or error.message}"


def parameters(question: pb.ModelQuestion) -> dict[str, Any]:
    """Sampling and tools as keyword arguments of the API."""
    sampling = question.sampling
    given: dict[str, Any] = {name: getattr(sampling, name) for name in PLAIN if sampling.HasField(name)}
    if sampling.HasField("max_tokens"):
        given["max_completion_tokens"] = sampling.max_tokens
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    beside = {name: getattr(sampling, name) for name in BESIDE if sampling.HasField(name)}
    if question.template_settings:
        beside["chat_template_kwargs"] = json.loads(question.template_settings)
    if beside:
        given["extra_body"] = beside
    if question.tools:
        given["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": json.loads(tool.parameters_json or "{}"),
                },
            }
            for tool in question.tools
        ]
    return given


def wire_message(message: common_pb2.Message, thinking: str = "") -> dict[str, Any]:
    """A message of the contract in the API's form, with what was thought under this name, if there is one."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if thinking and message.role == "assistant" and message.reasoning_content:
        wire[thinking] = message.reasoning_content
    if message.parts:
        wire["content"] = [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            if part.HasField("image_url")
            else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def answer_of(done: Any) -> pb.ModelAnswer:
    """A chat completion as an answer. Raises ValueError where it holds none."""
    if not done.choices:
        raise ValueError("the endpoint sent no choice")
    choice, usage = done.choices[0], done.usage
    said = choice.message
    message = common_pb2.Message(role="assistant", content=said.content or "")
    told = (getattr(said, name, None) for name in THINKING)
    message.reasoning_content = next((text for text in told if text), "")
    for call in said.tool_calls or []:
        if call.type == "function":
            message.tool_calls.add(
                id=call.id, name=call.function.name, arguments_json=call.function.arguments
            )
    sampled = max(1, usage.completion_tokens if usage else 1)
    return pb.ModelAnswer(
        prompt_token_ids=[0] * max(1, usage.prompt_tokens if usage else 1),
        token_ids=[0] * sampled,
        logprobs=[0.0] * sampled,
        message=message,
        truncated=choice.finish_reason == "length",
    )
