"""What a chat template shows of a conversation: found out by rendering small ones, not read from its text.

Templates differ in what they know. Some render no definitions of tools, some no answers of them, some no
calls of an earlier turn; and none says so.

1. No message of a tool or of the system is left out without a word: a policy that has not seen it answers
   something else than it was asked. Definitions of tools may be: some policies know theirs by heart.
2. What a template refuses by itself is not said to be left out: its own reason says more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Protocol

from quartet.errors import QuartetError, refused

from quartet_inference.chat.calls import ParsedCall

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

#: What a tool message answers where it does not say it: nine letters, as Mistral's templates demand.
CALL_ID: Final = "quartetid"
#: The call of the conversations that are rendered here.
CALL: Final = ParsedCall("quartet_call", '{"quartet_argument": "quartet_value"}')
MARK: Final = "QUARTETSHOWN"
TOOL: Final = {
    "type": "function",
    "function": {
        "name": CALL.name,
        "description": "",
        "parameters": {"type": "object", "properties": {"quartet_argument": {"type": "string"}}},
    },
}
REMEDY: Final = "give the model a template that shows them, by chat.template_file"
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

    @cached_property
    def call(self) -> str | None:
        """A turn that is CALL alone, as the template writes it, without what ends a turn; None where it
        writes none."""
        turn = self._after_call(())
        if turn is None or CALL.name not in turn or "quartet_value" not in turn:
            return None
        try:
            plain = self._render([_QUESTION, _ANSWER], [TOOL], opened=False)
        except QuartetError:
            return turn
        head, _, closing = plain.partition(MARK)
        # Some turns begin otherwise where they call.
        common = os.path.commonprefix([head, turn])  # noqa: RUF071 - of texts
        return turn[len(common) :].removesuffix(closing)

    @cached_property
    def tools(self) -> bool:
        """Whether definitions of tools are in the text."""
        try:
            return CALL.name in self._render([_QUESTION], [TOOL])
        except QuartetError:
            return True

    @cached_property
    def results(self) -> bool:
        """Whether what a tool answered is in the text."""
        answer = {"role": "tool", "name": CALL.name, "tool_call_id": CALL_ID, "content": MARK}
        text = self._after_call((answer,))
        return text is None or MARK in text

    @cached_property
    def user(self) -> bool:
        """Whether what a user says is; templates of models that see images know lists of parts alone."""
        return self._shows([{"role": "user", "content": MARK}])

    @cached_property
    def system(self) -> bool:
        """Whether a system message at the beginning is in the text."""
        return self._shows([{"role": "system", "content": MARK}, _QUESTION])

    @cached_property
    def later_system(self) -> bool:
        """Whether one behind an answer is."""
        return self._shows(
            [_QUESTION, {"role": "assistant", "content": "."}, {"role": "system", "content": MARK}, _QUESTION]
        )

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return MARK in self._render(messages, ())
        except QuartetError:
            return True

    def _after_call(self, more: Sequence[Message]) -> str | None:
        """A conversation with CALL and these messages; None where the template refuses it."""
        calls = [called(CALL.name, json.loads(CALL.arguments_json), CALL_ID)]
        caller = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            return self._render([_QUESTION, caller, *more], [TOOL], opened=False)
        except QuartetError:
            return None


def check_messages(shown: Shown, messages: Sequence[Message]) -> None:
    """Whether a template leaves none of them out (1). Errors: INVALID_REQUEST."""
    roles = [message["role"] for message in messages]
    for role, is_shown in (
        ("user", "user" not in roles or shown.user),
        ("tool", "tool" not in roles or shown.results),
        ("system", roles[0] != "system" or shown.system),
        ("system", "system" not in roles[1:] or shown.later_system),
    ):
        if not is_shown:
            raise refused("messages.role", role, f"the model's chat template leaves these out: {REMEDY}")
