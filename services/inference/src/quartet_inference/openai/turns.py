"""The messages of a conversation, as clients send them.

1. What a client's own library wrote beside an answer, and sends back with it, says nothing that the answer
   does not say (RESTATED): it is left out. Any other unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from quartet.v1 import common_pb2

from quartet_inference.openai.errors import malformed, unsupported
from quartet_inference.openai.parameters import without_nulls

#: `parse` and `stream` of OpenAI's clients add what they parsed, LiteLLM what it did not know.
RESTATED = frozenset({"parsed", "parsed_arguments", "provider_specific_fields"})
_Text = str | list[Any] | None


class Strict(pydantic.BaseModel):
    """A body without unknown fields."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class Sparse(Strict):
    """One that clients write from objects of their own: what is null there is left out, whatever it is."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields) if isinstance(fields, dict) else fields


class _Called(Sparse):
    name: str
    arguments: str


class _Call(Sparse):
    id: str
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = None


class TurnBody(Sparse):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name of the same
    annotations: Annotated[list[Any], pydantic.Field(max_length=0)] | None = None

    def wire(self, where: str) -> common_pb2.Message:
        """The message of the contract."""
        message = common_pb2.Message(
            # A developer's message is what a system message was called before.
            role="system" if self.role == "developer" else self.role,
            content=_text(self.content, f"{where}.content"),
            reasoning_content=self.reasoning_content or self.reasoning or "",
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )
        for call in self.tool_calls or ():
            message.tool_calls.add(
                id=call.id, name=call.function.name, arguments_json=call.function.arguments
            )
        return message


def _text(content: _Text, where: str) -> str:
    """Text of a message; its parts are lines, as vLLM and Verifiers (v1) have them."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise malformed(f"{where}[{index}]", "a content part has a type")
        if part["type"] != "text":
            raise unsupported(f"{where}[{index}].type", f"send text, not {part['type']}")
        if not isinstance(part.get("text"), str):
            raise malformed(f"{where}[{index}].text", "should be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def without_restated(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what restates it."""
    if message.get("role") != "assistant":
        return message
    left = _left(message)
    if isinstance(left.get("tool_calls"), list):
        left["tool_calls"] = [_plain_call(call) for call in left["tool_calls"]]
    return left


def _plain_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    return _left({**call, "function": _left(function)} if isinstance(function, dict) else call)


def _left(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in RESTATED}
