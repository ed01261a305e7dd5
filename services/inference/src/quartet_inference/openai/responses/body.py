"""What clients send to /v1/responses: checked, and said as a request of chat.

1. As in chat, a parameter is served, harmless, or refused by name with what to send instead. Errors and
   wishes have the names that the client sent.
2. `text.format` is chat's `response_format`, `tools` and `tool_choice` are chat's: what chat enforces of them
   is enforced, what it takes as a wish is a wish.
3. Chat's parameters beyond OpenAI's own are served under their names.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic

from quartet_inference.openai.bodies import ChatBody, chat_of
from quartet_inference.openai.errors import OpenAiError, malformed, unsupported
from quartet_inference.openai.parameters import json_object, validated, without_nulls
from quartet_inference.openai.responses.items import NOT_KEPT, messages_of
from quartet_inference.openai.turns import Sparse, Strict
from quartet_inference.openai.wishes import Wishing

LOGPROBS = "message.output_text.logprobs"
CARRIED = "reasoning.encrypted_content"
_INCLUDED = (LOGPROBS, CARRIED)

# They say who asks, or how an answer is kept and billed elsewhere.
_HARMLESS = frozenset(
    {
        "user",
        "store",
        "safety_identifier",
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)
# Accepted with these values only, because they ask for what is done anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "n": (1,),
}
_TOLD_WHOLE = "leave it out: thinking is told whole, as the item's content"
_TEMPLATE_SAYS = "leave it out: chat_template_kwargs say whether the model thinks"
_INSTEAD = {
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "background": "wait for the answer, or read it as a stream",
    "truncation": "leave out what is too much of the conversation",
    "context_management": "leave out what is too much of the conversation",
    "prompt": "send instructions and input",
    "messages": "send input",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "response_format": "send text.format",
    "logprobs": f'send include = ["{LOGPROBS}"]',
    "reasoning_effort": _TEMPLATE_SAYS,
    "max_tool_calls": "leave it out: it bounds the calls of tools that OpenAI runs, and none is here",
    "n": "ask once for each answer",
}
#: Served by chat under the same names.
_SAME = frozenset(
    {
        "model",
        "stream",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "seed",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "chat_template_kwargs",
        "run_id",
        "session_id",
        "prompt_cache_key",
        "min_policy_version",
        "exact_policy_version",
    }
)
# Names in errors and wishes of chat, and what they are called here.
_NAMES = (
    (re.compile(r"^messages\b"), "input"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\b(max_completion_tokens|max_tokens)\b"), "max_output_tokens"),
)


class _Tool(Sparse):
    type: Literal["function"]
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    defer_loading: Literal[False] = False


class _Text(Sparse):
    format: dict[str, Any] = pydantic.Field(default={"type": "text"})


class _StreamOptions(Sparse):
    include_obfuscation: bool = False  # nothing is obfuscated


class ResponsesBody(Strict):
    """What /v1/responses has of its own."""

    input: str | list[Any]
    instructions: str = ""
    tools: list[_Tool] = pydantic.Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    include: list[str] = pydantic.Field(default=[])
    max_output_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**32)] | None = None
    top_logprobs: int = 0
    metadata: dict[str, str] = pydantic.Field(default={})
    stream_options: _StreamOptions = _StreamOptions()

    def chat(self) -> dict[str, Any]:
        """The fields of chat that say the same."""
        messages = messages_of(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        asked = {
            "messages": messages,
            "tools": [_function(tool) for tool in self.tools] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": LOGPROBS in self.include,
        }
        return without_nulls(asked)


def parse_responses(raw: bytes, wishing: Wishing) -> tuple[ResponsesBody, ChatBody, list[str]]:
    """A request, the request of chat that it is, and the wishes that were taken from it.

    Raises OpenAiError.
    """
    own, same = {}, {}
    for name, value in sorted(json_object(raw).items()):
        if name in ResponsesBody.model_fields:
            own[name] = value
        elif name in _SAME:
            same[name] = value
        elif name == "reasoning":
            _check_thinking(value)
        elif name not in _HARMLESS and not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            raise unsupported(name, _INSTEAD.get(name, "leave it out"))
    body = _body(own)
    for index, part in enumerate(body.include):
        if part not in _INCLUDED:
            raise unsupported(f"include[{index}]", f"send {' or '.join(_INCLUDED)}, not {part}")
    if body.top_logprobs and LOGPROBS not in body.include:
        raise malformed("top_logprobs", f'only with include = ["{LOGPROBS}"]')
    try:
        chat, wishes = chat_of({**same, **body.chat(), "top_logprobs": body.top_logprobs}, wishing)
    except OpenAiError as error:
        raise error.renamed(sent_as) from None
    return body, chat, [sent_as(wish) for wish in wishes]


def sent_as(text: str) -> str:
    """A text about fields of chat, with the names that they have here."""
    for name, here in _NAMES:
        text = name.sub(here, text)
    return text


def _body(fields: dict[str, Any]) -> ResponsesBody:
    tools = fields.get("tools")
    if isinstance(tools, list):
        fields["tools"] = [_plain_tool(index, tool) for index, tool in enumerate(tools)]
    return validated(ResponsesBody, fields)


def _plain_tool(index: int, tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"tools[{index}].type", f"no {kind} is here: send tools of type function")
    return tool


def _check_thinking(asked: Any) -> None:
    """Raises OpenAiError for what is asked of thinking."""
    if not isinstance(asked, dict):
        raise malformed("reasoning", "should be an object")
    for name in without_nulls(asked):
        raise unsupported(f"reasoning.{name}", _TOLD_WHOLE if "summary" in name else _TEMPLATE_SAYS)


def _function(tool: _Tool) -> dict[str, Any]:
    """A tool as chat has it."""
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any]) -> Any:
    """A choice of tools as chat has it: what is named stands one level deeper."""
    if isinstance(choice, str):
        return choice
    kind, rest = choice.get("type"), {name: value for name, value in choice.items() if name != "type"}
    if kind not in ("function", "allowed_tools"):
        raise unsupported("tool_choice.type", f"choose a function or allowed_tools, not {kind}")
    if kind == "allowed_tools" and isinstance(rest.get("tools"), list):
        rest["tools"] = [_choice(tool) if isinstance(tool, dict) else tool for tool in rest["tools"]]
    return {"type": kind, kind: rest}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    """A form of the text as chat has it."""
    if form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in without_nulls(form).items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
