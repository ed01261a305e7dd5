"""What a chat template shows of a conversation: found out by rendering small ones, not read from its text.

Templates differ in what they know. Some render no definitions of tools, some no answers of them, some no
calls of an earlier turn; and none says so.

1. Nothing of what was said is left out without a word, neither a message nor a part of one (`left_out`): a
   policy that has not seen it answers something else than it was asked. The thinking of earlier turns may be,
   as templates drop it by design, and so may definitions of tools: some policies know theirs by heart. What
   the assistant said beside its calls is told of.
2. What a template refuses by itself is not said to be left out: its own reason says more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Protocol

from quartet.errors import QuartetError, refused
from quartet.left_out import ARGUMENT, NAME, TOOL, LeftOut, Message, Part, Tools, What

from quartet_inference.chat.calls import ParsedCall

#: What a tool message answers where it does not say it: nine letters, as Mistral's templates demand.
CALL_ID: Final = "quartetid"
#: The call of the conversations that are rendered here.
CALL: Final = ParsedCall(NAME, f'{{"{ARGUMENT}": "quartet_value"}}')
MARK: Final = "QUARTETSHOWN"
REMEDY: Final = "give the model a template that shows it, by chat.template_file"
#: What is told of, and not refused.
HIDDEN_TOOLS: Final = (
    "requests bring tools, and the chat template shows none: the policy knows of them only what the messages "
    "say; set chat.template_file to a template that shows them"
)
HIDDEN_BESIDE: Final = (
    "requests bring turns of the assistant with text beside calls, and the chat template leaves that out; "
    "set chat.template_file to a template that shows it, if the policy is to see it"
)
_LOOKED_AT: Final = (What.CONTENT, What.NAME, What.ARGUMENTS)
_QUESTION: Final = {"role": "user", "content": "."}
_ANSWER: Final = {"role": "assistant", "content": MARK}


class Render(Protocol):
    """Of a template: its text of a conversation. Errors: INVALID_REQUEST."""

    def __call__(self, messages: Sequence[Message], tools: Tools, opened: bool = True) -> str: ...


def called(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """A call of a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Shown:
    """Of one template."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.left_out = LeftOut(self._text, _LOOKED_AT)

    @cached_property
    def call(self) -> str | None:
        """A turn that is CALL alone, as the template writes it, without what ends a turn; None where it
        writes none."""
        calls = [called(CALL.name, json.loads(CALL.arguments_json), CALL_ID)]
        caller = {"role": "assistant", "content": "", "tool_calls": calls}
        turn = self._text([_QUESTION, caller], [TOOL], opened=False)
        if turn is None or CALL.name not in turn or "quartet_value" not in turn:
            return None
        plain = self._text([_QUESTION, _ANSWER], [TOOL], opened=False)
        if plain is None:
            return turn
        head, _, closing = plain.partition(MARK)
        # Some turns begin otherwise where they call.
        common = os.path.commonprefix([head, turn])  # noqa: RUF071 - of texts
        return turn[len(common) :].removesuffix(closing)

    @cached_property
    def tools(self) -> bool:
        """Whether definitions of tools are in the text."""
        text = self._text([_QUESTION], [TOOL], opened=True)
        return text is None or CALL.name in text

    def _text(self, messages: Sequence[Message], tools: Tools, opened: bool) -> str | None:
        """None where the template refuses them."""
        try:
            return self._render(messages, tools, opened)
        except QuartetError:
            return None


def check_messages(shown: Shown, messages: Sequence[Message], tools: Tools) -> bool:
    """Whether a template leaves out what the assistant said beside its calls, which is told and not refused:
    agents send their turns back as they came. Errors: INVALID_REQUEST where it leaves out anything else (1).
    """
    is_told = False
    for part in shown.left_out.parts(messages, tools, opened=True):
        message = messages[part.message]
        if part.call is None and message["role"] == "assistant" and message.get("tool_calls"):
            is_told = True
            continue
        field, value = _said(message, part)
        raise refused(
            f"messages[{part.message}].{field}",
            value,
            f"the model's chat template leaves it out: {_instead(messages, part)}{REMEDY}",
        )
    return is_told


def _said(message: Message, part: Part) -> tuple[str, str]:
    """The field of a message, as the contract calls it, and what it has."""
    if part.call is None:
        return part.what.value, message["content"]
    function = message["tool_calls"][part.call]["function"]
    if part.what is What.NAME:
        return f"tool_calls[{part.call}].name", function["name"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"tool_calls[{part.call}].arguments_json", text


def _instead(messages: Sequence[Message], part: Part) -> str:
    """What else a sender could do, where there is something."""
    message = messages[part.message]
    systems = [number for number, one in enumerate(messages) if one["role"] == "system"]
    if part.call:
        return "send one call in each message, or "
    if message["role"] == "system" and systems != [0]:
        return "send one system message, at the beginning, or "
    if message["role"] == "developer":
        return "send it as system, or "
    if message["role"] == "tool" and not any(one.get("tool_calls") for one in messages[: part.message]):
        return "send it behind the call that it answers, or "
    return ""
