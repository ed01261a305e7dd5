"""What of a conversation a chat template leaves out: found out by rendering, not read from its text.

Some templates write the first of a turn's calls alone, no text beside calls, the last of several system
messages; and none says so.

1. Looked at are a message's content and thinking, and the name and the arguments of each of its calls.
2. One is left out where that is sure: in a conversation of the same form, in which each of them is a word of
   its own, its word is missing, and with a word in its place the conversation itself is rendered to the same
   text. So it does not matter in what form a template writes it (escaped, trimmed, in capitals).
3. What an assistant said counts as shown where the template shows it while it is the last that was said:
   what is dropped of it later, thinking as a rule, belongs to how the model was trained.
4. A call that is told by its id needs no name: in Kimi's ids it is.
5. What a template refuses is not left out: its own reason says more.
6. Of parts of one kind (whose, what, beside calls or not, of the first call or another) the first that is
   left out is told, and no more than MAX_ASKED are asked about: conversations are long, and templates treat
   those alike. What is missing in the MAX_FORMS forms that were used last is known.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
#: The text of messages with tools, opened for the assistant or not; None where the template refuses them.
Render = Callable[[Sequence[Message], Tools, bool], str | None]

MAX_FORMS: Final = 64
#: Each takes three renderings.
MAX_ASKED: Final = 4
#: No template has these in it.
NAME: Final = "quartet_call"
ARGUMENT: Final = "quartet_argument"
#: What may be called in a conversation that is rendered for a look.
TOOL: Final = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string"}}},
    },
}
_WORD: Final = re.compile(r"quartetword(\d+)z", re.IGNORECASE)
#: Of a message; templates call its thinking differently.
_THINKING: Final = ("reasoning_content", "thinking")


class What(enum.Enum):
    """Of a message. The value is its key."""

    CONTENT = "content"
    THINKING = "reasoning_content"
    NAME = "name"
    ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Part:
    """One of a conversation."""

    #: They count from 0.
    message: int
    what: What
    #: Of a message's calls, likewise; None beside them.
    call: int | None = None


class LeftOut:
    """Of one template."""

    def __init__(self, render: Render, looked_at: Collection[What] = tuple(What)) -> None:
        self._render = render
        self._looked_at = frozenset(looked_at)
        self._unwritten = lru_cache(MAX_FORMS)(self._unwritten_of)

    def parts(self, messages: Sequence[Message], tools: Tools, opened: bool) -> Iterator[Part]:
        """The first of each kind that are left out, in the conversation's order."""
        asked: Counter[tuple[Any, ...]] = Counter()
        for part in self._missing(messages, bool(tools), opened):
            message = messages[part.message]
            kind = (message["role"], part.what, bool(message.get("tool_calls")), bool(part.call))
            if asked[kind] < MAX_ASKED:
                asked[kind] += 1
                if self._is_left_out(part, messages, tools, opened):
                    asked[kind] = MAX_ASKED
                    yield part

    def _is_left_out(self, part: Part, messages: Sequence[Message], tools: Tools, opened: bool) -> bool:
        """Whether one that is missing is (2, 3)."""
        if messages[part.message]["role"] == "assistant":
            messages, opened = messages[: part.message + 1], False
            if part not in self._missing(messages, bool(tools), opened):
                return False
        text = self._render(messages, tools, opened)
        replaced = _worded(messages, {part: _word(0)})
        return text is not None and text == self._render(replaced, tools, opened)

    def _missing(self, messages: Sequence[Message], with_tools: bool, opened: bool) -> Sequence[Part]:
        """Parts whose words are missing in a conversation of the same form."""
        # All of them are words there, those that are not looked at, too: else each would be a form.
        parts = list(_parts_of(messages))
        words = {part: _word(number) for number, part in enumerate(parts)}
        form = json.dumps(_worded(_bare(messages), words))
        missing = [parts[number] for number in self._unwritten(form, len(parts), with_tools, opened)]
        return [part for part in missing if part.what in self._looked_at]

    def _unwritten_of(self, form: str, words: int, with_tools: bool, opened: bool) -> Sequence[int]:
        """Of so many words those that are not in the text of a form."""
        messages = json.loads(form)
        text = self._render(messages, [TOOL] if with_tools else [], opened)
        if text is None:
            return ()
        written = _words_in(text)
        for message in messages:
            for call in message.get("tool_calls", ()):
                if call["id"] and call["id"] in text:
                    written |= _words_in(call["function"]["name"])
        return [number for number in range(words) if number not in written]


def _word(number: int) -> str:
    return f"QUARTETWORD{number}Z"


def _words_in(text: str) -> set[int]:
    return {int(number) for number in _WORD.findall(text)}


def _parts_of(messages: Sequence[Message]) -> Iterator[Part]:
    """All that say anything."""
    for number, message in enumerate(messages):
        if message["content"].strip():
            yield Part(number, What.CONTENT)
        if message.get("reasoning_content", "").strip():
            yield Part(number, What.THINKING)
        for at, call in enumerate(message.get("tool_calls", ())):
            yield Part(number, What.NAME, at)
            arguments = call["function"]["arguments"]
            if arguments and isinstance(arguments, str | dict):
                yield Part(number, What.ARGUMENTS, at)


def _worded(messages: Sequence[Message], words: Mapping[Part, str]) -> Sequence[Message]:
    """With these words in the places of parts."""
    worded = [dict(message) for message in messages]
    for part, word in words.items():
        message = worded[part.message]
        match part.what:
            case What.CONTENT:
                message["content"] = word
            case What.THINKING:
                message |= {key: word for key in _THINKING if key in message}
            case What.NAME:
                _put(message, part.call, "name", word)
            case What.ARGUMENTS:
                is_text = isinstance(message["tool_calls"][part.call]["function"]["arguments"], str)
                _put(message, part.call, "arguments", word if is_text else {ARGUMENT: word})
    return worded


def _put(message: dict[str, Any], at: int | None, key: str, value: Any) -> None:
    """Of a call of a message; the given one stays as it is."""
    calls = list(message["tool_calls"])
    assert at is not None
    calls[at] = {**calls[at], "function": {**calls[at]["function"], key: value}}
    message["tool_calls"] = calls


def _bare(messages: Sequence[Message]) -> Sequence[Message]:
    """Without what differs between conversations of one form besides their parts: ids and names of results.

    Ids are of nine letters and digits, as Mistral's templates demand.
    """
    ids: dict[str, str] = {"": ""}

    def known(call_id: str) -> str:
        return ids.setdefault(call_id, f"q{len(ids):08d}")

    bare = []
    for message in messages:
        one = dict(message)
        if "tool_calls" in one:
            one["tool_calls"] = [{**call, "id": known(call["id"])} for call in one["tool_calls"]]
        if "tool_call_id" in one:
            one["tool_call_id"] = known(one["tool_call_id"])
        if "name" in one:
            one["name"] = NAME
        bare.append(one)
    return bare
