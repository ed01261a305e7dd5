"""Turns in OpenAI's harmony format, as gpt-oss writes them: a sequence of messages, each with a header.

    <|channel|>analysis<|message|>Two and two<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>

1. What is in the channel `analysis` is thinking; in `final`, or in none, content; and so is what `commentary`
   tells nobody in particular: a preamble, which is meant for the user. Several are joined by line ends.
2. A message to `functions.NAME`, or to a tool of the request by its bare name, is a call where its body is a
   JSON object. Where no tools are given nothing is.
3. Any other message (a call that is none, a tool that is built into the model, another role's turn, an
   unknown channel, text without a header) is content as it was written, its marks and its end included.
4. A message ends at the first mark that ends one, or with the text. Of one that is cut off within its header
   nothing is said.
5. Whole or piece by piece, a text is read in one way, each character once: what was told stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quartet_inference.chat.calls import ParsedCall, json_object, skip_space
from quartet_inference.chat.reader import Said, Turn, hold_partial

#: As vLLM's `--tool-call-parser` names it.
NAME = "openai"
START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
#: Of a turn; behind the end of any other message the model goes on.
TURN_ENDS = ("<|call|>", "<|return|>")
ENDS = ("<|end|>", *TURN_ENDS)
MARKS = (START, MESSAGE, CHANNEL, CONSTRAIN, *ENDS)
#: What opens a turn of the model; the prompt ends with it.
ASSISTANT = f"{START}assistant"
#: A header of more characters is none: with a tool's name of 256, all that a model could mean has room.
MAX_HEADER = 512

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_FUNCTIONS = "functions."
_TO = "to="


def speaks_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


def opened_by(prompt: str) -> str:
    """What a prompt has of the message that it opens, as of a template that begins the thinking itself."""
    _, opened, rest = prompt.rpartition(ASSISTANT)
    header, message, _ = rest.partition(MESSAGE)
    return header + message if opened and not any(end in rest for end in ENDS) else ""


@dataclass(frozen=True)
class _Header:
    """What stands before a message's body."""

    channel: str
    recipient: str


class _In(Enum):
    """What is being read. A message begins in its header, and is one of the others from `<|message|>` on."""

    HEADER = "header"
    THINKING = "thinking"
    CONTENT = "content"
    CALL = "call"  # nothing is told of it before its end: it may be none
    WRITTEN = "written"  # content as it is; also a header, from where it can be none


class HarmonyReader:
    """Reads one completion (reader.TurnReader)."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], opened: str = "") -> None:
        """`opened`: what the prompt has of the first message, `opened_by`."""
        self._opened = opened
        self._tools = frozenset(tool["function"]["name"] for tool in tools)
        self._growing = _Messages(self._tools, opened)

    def feed(self, text: str) -> Said:
        """More text; what it adds."""
        growing = self._growing
        reasoning, content = len(growing.reasoning), len(growing.content)
        growing.feed(text)
        return Said("".join(growing.reasoning[reasoning:]), "".join(growing.content[content:]))

    def finish(self, text: str) -> Turn:
        """The turn of the whole text."""
        messages = _Messages(self._tools, self._opened)
        messages.feed(text)
        messages.close()
        return Turn("".join(messages.content), "".join(messages.reasoning), tuple(messages.calls))


class _Messages:
    """The messages of one growing text."""

    def __init__(self, tools: Collection[str], opened: str) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[ParsedCall] = []
        self._tools = tools
        self._held = ""  # perhaps a mark begins
        self._begin()
        self._header, message, _ = opened.partition(MESSAGE)
        if message:
            self._open()

    def feed(self, text: str) -> None:
        """More text."""
        text = self._held + text
        at = 0
        for mark in _MARK.finditer(text):
            self._take(text[at : mark.start()])
            self._take_mark(mark[0])
            at = mark.end()
        sure = hold_partial(text[at:], MARKS)
        self._take(sure)
        self._held = text[at + len(sure) :]

    def close(self) -> None:
        """The text ends here."""
        self._take(self._held)
        if self._in is _In.CALL:
            self._call("")
        elif self._in is _In.HEADER and not _is_cut_header(self._header):
            self._write()

    def _begin(self) -> None:
        """A message."""
        self._in = _In.HEADER
        self._header = ""
        self._name = ""  # of the tool that it calls
        self._body: list[str] = []  # of a call
        self._written: list[str] = []  # all of it, while it is not sure what it is
        self._told = False  # something of it

    def _take(self, text: str) -> None:
        """Text of the message, or a mark that has no meaning here."""
        if not text:
            return
        if self._in is _In.HEADER:
            self._header += text
            self._written.append(text)
            if len(self._header) > MAX_HEADER or not _may_begin_header(self._header):
                self._write()
        elif self._in is _In.CALL:
            self._body.append(text)
            self._written.append(text)
        else:
            self._tell(text)

    def _take_mark(self, mark: str) -> None:
        if mark in ENDS:
            self._end(mark)
        elif mark == MESSAGE and self._in is _In.HEADER:
            self._written.append(mark)
            self._open()
        else:
            self._take(mark)

    def _open(self) -> None:
        """The body, behind its header."""
        header = _read_header(self._header)
        name = self._called(header.recipient) if header is not None else ""
        if header is None or (header.recipient and not name):
            self._write()
        elif name:
            self._in, self._name = _In.CALL, name
        elif header.channel == "analysis":
            self._in = _In.THINKING
        elif header.channel in ("final", "commentary", ""):
            self._in = _In.CONTENT
        else:
            self._write()

    def _called(self, recipient: str) -> str:
        """The tool that a message to this recipient calls; empty: none (2)."""
        if recipient in self._tools:
            return recipient
        return recipient.removeprefix(_FUNCTIONS) if self._tools and recipient.startswith(_FUNCTIONS) else ""

    def _end(self, mark: str) -> None:
        """The message ends with this mark."""
        if self._in is _In.HEADER and (self._header.strip() or self._written):
            self._write()
        if self._in is _In.CALL:
            self._call(mark)
        elif self._in is _In.WRITTEN:
            self._tell(mark)
        self._begin()

    def _call(self, end: str) -> None:
        """The call that was read; as it was written where it is none."""
        body = "".join(self._body)
        try:
            arguments, at = json_object(body, skip_space(body, 0))
            if skip_space(body, at) < len(body):
                raise ValueError("more than an object")
            self.calls.append(ParsedCall(self._name, arguments))
        except ValueError:
            self._write()
            self._tell(end)

    def _write(self) -> None:
        """It is content as it was written, from its beginning on (3)."""
        self._in = _In.WRITTEN
        self._tell("".join(self._written))

    def _tell(self, text: str) -> None:
        if not text:
            return
        field = self.reasoning if self._in is _In.THINKING else self.content
        if field and not self._told:
            field.append("\n")
        self._told = True
        field.append(text)


def _may_begin_header(text: str) -> bool:
    """Whether a header may begin so."""
    begun = text.lstrip()[: len(_TO)]
    return begun.startswith("<|") or _TO.startswith(begun)


def _is_cut_header(text: str) -> bool:
    """Whether a text ends within a header, or before it; a recipient alone may be any text."""
    return ASSISTANT.startswith(text.strip()) or (CHANNEL in text and _read_header(text) is not None)


def _read_header(text: str) -> _Header | None:
    """What a header says: role, recipient, channel, recipient, type of the body, each where it is there.

    None: it is none.
    """
    before, _, behind = text.partition(CHANNEL)
    channel, *words = behind.replace(CONSTRAIN, " ").split() or [""]
    addressed = before.strip().removeprefix(ASSISTANT).split()
    recipients = [word.removeprefix(_TO) for word in (*addressed, *words) if word.startswith(_TO)]
    types = [word for word in words if not word.startswith(_TO)]
    strange = any("<|" in word for word in (channel, *words, *addressed))
    if strange or len(recipients) > 1 or len(types) > 1 or not all(one.startswith(_TO) for one in addressed):
        return None
    return _Header(channel, *recipients or [""])
