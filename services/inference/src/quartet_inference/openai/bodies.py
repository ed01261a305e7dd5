"""The bodies of completions, as clients send them, turned into requests of the contract.

No parameter is ignored (parameters.py), but wishes where the configuration takes them (wishes.py).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
from quartet import template_settings
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.engine import MAX_TOP
from quartet_inference.openai.errors import malformed
from quartet_inference.openai.forms import Chosen, Forms, tool_choice
from quartet_inference.openai.parameters import json_object, served, validated
from quartet_inference.openai.turns import Sparse, Strict, TurnBody, without_restated
from quartet_inference.openai.wishes import Wishing, without_forms, without_wishes

#: Choices of one call, over all of its prompts.
MAX_CHOICES = 256
#: Log-probabilities of one answer, alternatives included: 40 bytes of JSON each, in chat 100, more in memory.
MAX_LOGPROBS = 900_000
#: What the API's documentation gives /v1/completions where max_tokens is left out.
COMPLETION_TOKENS = 16
#: Of SamplingParams, under the names that clients use.
_SCALARS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")


class _StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is obfuscated
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk, beside that at the end


class _Sampling(Forms):
    """What both kinds of completion have in common."""

    model: str
    n: Annotated[int, pydantic.Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, pydantic.Field(ge=-(2**63), lt=2**64)] | None = None
    # Beyond OpenAI's own, with vLLM's names.
    top_k: Annotated[int, pydantic.Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Annotated[int, pydantic.Field(ge=0, lt=2**32)]] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # And Quartet's: as in GenerateRequest.
    run_id: str = ""
    session_id: str = ""
    prompt_cache_key: str = ""
    min_policy_version: Annotated[int, pydantic.Field(ge=0, lt=2**64)] | None = None
    exact_policy_version: Annotated[int, pydantic.Field(ge=0, lt=2**64)] | None = None

    def limit(self) -> int | None:
        """Most tokens of a choice."""
        return self.max_tokens

    def request(self) -> pb.GenerateRequest:
        """The request, but for its prompt."""
        if self.stream_options is not None and not self.stream:
            raise malformed("stream_options", "only with stream = true")
        request = pb.GenerateRequest(
            run_id=self.run_id, session_id=self.session_id or self.prompt_cache_key, n=self.n
        )
        for name in ("min_policy_version", "exact_policy_version"):
            if getattr(self, name) is not None:
                setattr(request, name, getattr(self, name))
        sampling = request.sampling
        for name in _SCALARS:
            if getattr(self, name) is not None:
                setattr(sampling, name, getattr(self, name))
        limit = self.limit()
        if limit is not None:
            sampling.max_tokens = limit
        if self.seed is not None:
            sampling.seed = self.seed % 2**64
        if self.top_k is not None:
            sampling.top_k = max(0, self.top_k)
        sampling.ignore_eos = self.ignore_eos
        sampling.min_tokens = self.min_tokens
        sampling.stop.extend([self.stop] if isinstance(self.stop, str) else self.stop or ())
        sampling.stop_token_ids.extend(self.stop_token_ids or ())
        if (form := self.form()) is not None:
            sampling.structure.CopyFrom(form[1])
        return request

    @property
    def form_name(self) -> str:
        """What the client calls the form that it asks for; empty where it asks for none."""
        form = self.form()
        return "" if form is None else form[0]


class _Function(Sparse):
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False


class _Tool(Sparse):
    type: Literal["function"]
    function: _Function


class ChatBody(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[TurnBody], pydantic.Field(min_length=1)]
    tools: list[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] = pydantic.Field(default_factory=dict)
    tool_choice: Literal["auto", "none", "required"] | Chosen = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**32)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, pydantic.Field(ge=0, le=MAX_TOP)] = 0

    @property
    def alternatives(self) -> int:
        """Told of each token."""
        return self.top_logprobs

    def limit(self) -> int | None:
        """`max_completion_tokens` is the newer name; where both are given they must agree."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise malformed("max_completion_tokens", "differs from max_tokens; send one of them")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def requests(self, room: int) -> list[pb.GenerateRequest]:
        """The one request that this is; `room` is the most tokens that a choice can have."""
        if self.top_logprobs and not self.logprobs:
            raise malformed("top_logprobs", "only with logprobs = true")
        if self.top_logprobs:
            tokens = self.n * min(self.limit() or room, room)
            _check_logprobs(tokens, self.top_logprobs, "top_logprobs", "send max_tokens, or fewer of them")
        request = self.request()
        try:
            request.template_settings = template_settings.written(self.chat_template_kwargs)
        except ValueError as error:
            raise malformed("chat_template_kwargs", str(error)) from error
        for index, message in enumerate(self.messages):
            request.messages.messages.append(message.wire(f"messages[{index}]"))
        functions = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        for function in functions:
            tool = request.tools.add(name=function.name, description=function.description)
            tool.parameters_json = "" if function.parameters is None else json.dumps(function.parameters)
            tool.strict = function.strict
        offered = [function.name for function in functions]
        choice = tool_choice(self.tool_choice, not self.parallel_tool_calls, offered)
        if choice is not None:
            request.tool_choice.CopyFrom(choice)
        return [request]


class CompletionBody(_Sampling):
    """POST /v1/completions. Token prompts go to the engine as they are."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, pydantic.Field(ge=0, lt=2**32)] | None = None
    echo: bool = False
    logprobs: Annotated[int, pydantic.Field(ge=0, le=MAX_TOP)] | None = None
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int:
        """Told of each token."""
        return self.logprobs or 0

    def limit(self) -> int | None:
        """The documented default is short."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompts: list[Any] = [prompt]
        else:
            prompts = list(prompt)
        if not prompts or len(prompts) * self.n > MAX_CHOICES:
            raise malformed("prompt", f"send 1 to {MAX_CHOICES} prompts, times n")
        return prompts

    def requests(self, token_ids: list[list[int]]) -> list[pb.GenerateRequest]:
        """One request for each prompt."""
        if self.max_tokens == 0 and not self.echo:
            raise malformed("max_tokens", "send at least 1, or echo: nothing would be told")
        if self.logprobs or (self.echo and self.logprobs is not None):
            told = [len(ids) if self.echo else 0 for ids in token_ids]
            tokens = self.n * sum(prompt + (self.limit() or 0) for prompt in told)
            remedy = "send fewer prompts, or max_tokens or logprobs below"
            _check_logprobs(tokens, self.alternatives, "prompt", remedy)
        requests = []
        for ids in token_ids:
            if any(not 0 <= token < 2**32 for token in ids):
                raise malformed("prompt", f"a token is a number from 0 to {2**32 - 1}")
            request = self.request()
            if request.sampling.HasField("structure"):
                request.sampling.structure.from_first_token = True
            if self.max_tokens == 0:  # Echo samples nothing
                request.sampling.ClearField("max_tokens")
            request.tokens.token_ids.extend(ids)
            requests.append(request)
        return requests


def _check_logprobs(tokens: int, alternatives: int, field: str, remedy: str) -> None:
    """Raises OpenAiError where so many tokens might have more than one answer holds."""
    if tokens * (1 + alternatives) > MAX_LOGPROBS:
        few = f"an answer has at most {MAX_LOGPROBS} log-probabilities, alternatives included"
        raise malformed(field, f"{few}; {remedy}")


def parse_chat(raw: bytes, wishing: Wishing) -> tuple[ChatBody, list[str]]:
    """A chat request, and the wishes that were taken from it. Raises OpenAiError."""
    return chat_of(json_object(raw), wishing)


def chat_of(asked: dict[str, Any], wishing: Wishing) -> tuple[ChatBody, list[str]]:
    """As `parse_chat`, of what was parsed already."""
    given, wishes = without_wishes(asked, wishing)
    fields = served(given, set(ChatBody.model_fields))
    for index, message in enumerate(_dicts(fields.get("messages"))):
        fields["messages"][index] = without_restated(message)
    return validated(ChatBody, fields), wishes


def parse_completion(raw: bytes, wishing: Wishing) -> tuple[CompletionBody, list[str]]:
    """A completion request, and the wishes that were taken from it. Raises OpenAiError."""
    given, wishes = without_forms(json_object(raw), wishing)
    return validated(CompletionBody, served(given, set(CompletionBody.model_fields))), wishes


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The list itself, where it is one of objects; the model's check says what is wrong otherwise."""
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []
