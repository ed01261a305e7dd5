"""The events of a streamed response: one object that grows, told in numbered steps.

1. `sequence_number` counts from 0 without a gap. `output_index` is an item's place in the last event's
   output; every item that is added is done before that.
2. Deltas of an item add up to its text, unless the turn as a whole reads otherwise than it did while it was
   written: the last event is right.
3. Each log-probability is told in one delta, with the text that it came with or before, and once more where
   the text is done.
4. A stream that fails says so in an `error`, as clients raise it, and in `response.failed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quartet_inference.answering import Ended
from quartet_inference.chat import Said
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.openai.responses.output import Item, begun, closed, output_of, part_of, said

Event = dict[str, Any]

# What an item's text is called in the names of events.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class Narrator:
    """Tells one response."""

    def __init__(self, frame: Item, carry: bool) -> None:
        """`carry`: as of `output.said`."""
        self._frame = frame
        self._carry = carry
        self._number = 0
        self._begun: dict[str, Item] = {}  # by kind, in the order of the output
        self._told: dict[str, str] = {}  # of each of them
        self._done: set[str] = set()
        self._waiting: list[Item] = []  # log-probabilities whose text is still to come

    def begin(self) -> Iterator[Event]:
        """The response, of which nothing is said yet."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._frame)

    def say(self, more: Said, logprobs: Sequence[Item]) -> Iterator[Event]:
        """A piece of thinking, of the message, or of what is not told yet."""
        self._waiting += logprobs
        if more.reasoning and "reasoning" not in self._done:
            yield from self._delta("reasoning", more.reasoning)
        if more.content:
            if "reasoning" in self._begun and "reasoning" not in self._done:
                item = said(self._begun["reasoning"], self._told["reasoning"], carry=self._carry)
                yield from self._text_done(self._place("reasoning"), item)
            yield from self._delta("message", more.content)

    def end(
        self, rest: Said, ended: Ended, logprobs: Sequence[Item], usage: Item, more: Item
    ) -> Iterator[Event]:
        """What was not told yet, and the whole response, of which `more` is said, too."""
        output = output_of(ended, logprobs, self._carry, self._begun)
        left = {"reasoning": rest.reasoning, "message": rest.content}
        for place, item in enumerate(output):
            kind = item["type"]
            if kind == "function_call":
                yield from self._call(place, item)
            elif kind not in self._done:
                if kind not in self._begun:
                    yield from self._add(kind, item["id"])
                if left[kind] or (kind == "message" and self._waiting):
                    yield from self._delta(kind, left[kind])
                yield from self._text_done(place, item)
        whole = closed({**self._frame, **more}, output, ended, usage)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: OpenAiError) -> Iterator[Event]:
        """The end of a stream that failed (4)."""
        told = error.body["error"]
        flat = {name: told[name] for name in ("code", "message", "param")}
        yield self._event("error", **flat, error=told)  # flat as documented, nested as it is raised
        why = {"code": "server_error", "message": told["message"]}
        yield self._event("response.failed", response={**self._frame, "status": "failed", "error": why})

    def _place(self, kind: str) -> int:
        return list(self._begun).index(kind)

    def _delta(self, kind: str, text: str) -> Iterator[Event]:
        """More of an item's text."""
        if kind not in self._begun:
            yield from self._add(kind)
        self._told[kind] += text
        logprobs = {}
        if kind == "message":
            logprobs = {"logprobs": self._waiting}
            self._waiting = []
        item = self._begun[kind]
        yield self._of_part(f"{_TEXTS[kind]}.delta", self._place(kind), item, delta=text, **logprobs)

    def _add(self, kind: str, name: str = "") -> Iterator[Event]:
        item = begun(kind)
        self._begun[kind] = item if not name else {**item, "id": name}
        self._told[kind] = ""
        place = self._place(kind)
        yield self._event("response.output_item.added", output_index=place, item=self._begun[kind])
        yield self._of_part("content_part.added", place, self._begun[kind], part=part_of(kind, ""))

    def _text_done(self, place: int, item: Item) -> Iterator[Event]:
        kind, (part,) = item["type"], item["content"]
        self._done.add(kind)
        logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
        yield self._of_part(f"{_TEXTS[kind]}.done", place, item, text=part["text"], **logprobs)
        yield self._of_part("content_part.done", place, item, part=part)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _call(self, place: int, item: Item) -> Iterator[Event]:
        """A call of a tool: it is told when it can be read, as a whole."""
        at = {"output_index": place, "item_id": item["id"]}
        new = {**item, "status": "in_progress", "arguments": ""}
        arguments = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=place, item=new)
        yield self._event(f"{arguments}.delta", **at, delta=item["arguments"])
        yield self._event(f"{arguments}.done", **at, name=item["name"], arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _of_part(self, name: str, place: int, item: Item, **more: Any) -> Event:
        return self._event(
            f"response.{name}", output_index=place, item_id=item["id"], content_index=0, **more
        )

    def _event(self, kind: str, /, **more: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event
