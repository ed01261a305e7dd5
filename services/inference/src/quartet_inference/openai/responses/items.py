"""The items of a conversation as the Responses API has them, as the messages of chat that they are.

1. What was said in one turn is one message again: its thinking, its text, its calls, in this order. An item
   that goes back in the order begins another turn.
2. Thinking comes back in the item's content, in its `encrypted_content` (`carried`), or as a summary: the
   first that is there. One that was encrypted elsewhere is refused: nobody here can read it.
3. What only repeats or names an item (its id and status, log-probabilities, what a client parsed) is left
   out. Any other unknown field or kind is refused, and so is what only refers to an item: none is kept.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

import pydantic

from quartet_inference.openai.errors import malformed, unsupported
from quartet_inference.openai.parameters import validated, without_nulls
from quartet_inference.openai.turns import RESTATED, Strict

NOT_KEPT = "responses are not kept here: send the items of the conversation in input"
# Of an item and of its parts.
_UNSAID = RESTATED | {"id", "status", "annotations", "logprobs", "phase"}
#: Thinking that is carried, not encrypted: it begins so.
_CARRIED = "quartet.1."

Message = dict[str, Any]


class _Part(Strict):
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str


class _Item(Strict):
    """One item; `message` is the one of chat that it is."""

    def message(self, where: str) -> Message:
        raise NotImplementedError


class _Said(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]

    def message(self, where: str) -> Message:
        return {"role": self.role, "content": _text(self.content, f"{where}.content")}


class _Called(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def message(self, where: str) -> Message:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


class _Answered(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Any]
    name: str = ""

    def message(self, where: str) -> Message:
        content = _text(self.output, f"{where}.output")
        return {"role": "tool", "tool_call_id": self.call_id, "content": content, "name": self.name}


class _Thought(_Item):
    type: Literal["reasoning"]
    summary: list[Any] = pydantic.Field(default=[])
    content: list[Any] = pydantic.Field(default=[])
    encrypted_content: str = ""

    def message(self, where: str) -> Message:
        text = _text(self.content, f"{where}.content", between="")
        if not text and self.encrypted_content:
            text = _uncarried(self.encrypted_content, f"{where}.encrypted_content")
        text = text or _text(self.summary, f"{where}.summary", between="")
        return {"role": "assistant", "reasoning_content": text}


_KINDS: dict[str, type[_Item]] = {
    "message": _Said,
    "function_call": _Called,
    "function_call_output": _Answered,
    "reasoning": _Thought,
}
#: What one turn of the assistant is made of, in its order.
_ORDER = ("reasoning_content", "content", "tool_calls")


def messages_of(items: str | list[Any]) -> list[Message]:
    """The messages of an input. Raises OpenAiError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise malformed("input", "send a text or at least one item")
    messages: list[Message] = []
    for index, item in enumerate(items):
        _join(messages, _message(item, f"input[{index}]"))
    return messages


def carried(reasoning: str) -> str:
    """Thinking as a client carries it to its next request without looking at it."""
    return _CARRIED + base64.b64encode(reasoning.encode()).decode()


def _uncarried(text: str, where: str) -> str:
    try:
        if text.startswith(_CARRIED):
            return base64.b64decode(text.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise malformed(where, f"is not what was sent from here: {error}") from None
    raise unsupported(where, "it was encrypted elsewhere: leave the item out, or send its content")


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise malformed(where, "an item is an object")
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        remedy = f"{NOT_KEPT}, as clients that refer to them do with store = false"
        raise unsupported(f"{where}.type", remedy)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise unsupported(f"{where}.type", f"send {', '.join(_KINDS)}, not {kind}")
    return validated(_KINDS[kind], _stated(item), where).message(where)


def _join(messages: list[Message], message: Message) -> None:
    """One more message, or more of the assistant's last."""
    last = messages[-1] if messages else {"role": ""}
    if message["role"] == last["role"] == "assistant":
        said = max(at for at, part in enumerate(_ORDER) if part in last)
        (more,) = (at for at, part in enumerate(_ORDER) if part in message)
        if more > said:
            last[_ORDER[more]] = message[_ORDER[more]]
            return
        if more == said == _ORDER.index("tool_calls"):
            last["tool_calls"] += message["tool_calls"]
            return
    messages.append(message)


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in without_nulls(fields).items() if name not in _UNSAID}


def _text(content: str | list[Any], where: str, between: str = "\n") -> str:
    """The text of parts, joined as those of a chat."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise malformed(here, "a content part has a type")
        if not part["type"].endswith("_text"):
            raise unsupported(f"{here}.type", f"send text, not {part['type']}")
        texts.append(validated(_Part, _stated(part), here).text)
    return between.join(texts)
