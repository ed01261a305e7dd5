"""One choice of an answer while it grows, and as a whole.

1. Text told while streaming is a beginning of the whole text: no half characters, nothing of a stop string,
   of an end token, or of a call that is still being written. `rest` tells what remains.
2. Log-probabilities and token ids are those of every sampled token, the ends included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.answering import Ended
from quartet_inference.chat import Said, TurnReader, hold_partial
from quartet_inference.engine import Delta
from quartet_inference.stop_strings import Stops, find
from quartet_inference.text_stream import Detokenize, TextStream

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

#: Those of a template, with words between them such as the name of a channel, and white space.
_MARKS = r"\s*(?:(?:<[^<>]*>|\[[^\[\]]*\])(?:\w+(?=[<\n]))??\s*)*?"


class Speaker:
    """Tells a growing choice piece by piece."""

    def __init__(self, detokenize: Detokenize, reader: TurnReader, stops: Stops) -> None:
        self._stream = TextStream(detokenize)
        self._reader = reader
        self._stops = stops.strings
        self._first = stops.min_tokens  # so many tokens to come in whose text no stop string is heeded
        self._unheeded = 0  # characters of it that are held
        self._last: list[int] = []  # the last token: it may be what ends the choice
        self._held = ""
        self._reasoning = ""
        self._content = ""

    def feed(self, delta: Delta) -> Said:
        """More tokens; what can be told of them."""
        tokens = [*self._last, *delta.token_ids]
        self._last = tokens[-1:]
        text = self._held + self._fed(tokens[:-1])
        ready = hold_partial(text, self._stops) if self._stops else text
        ends = [at for stop in self._stops if (at := find(ready, stop, self._unheeded)) >= 0]
        ready = ready[: min(ends, default=None)]
        self._held = text[len(ready) :]
        self._unheeded = max(0, self._unheeded - len(ready))
        said = self._reader.feed(ready)
        self._reasoning += said.reasoning
        self._content += said.content
        return said

    def _fed(self, tokens: Sequence[int]) -> str:
        first, others = tokens[: self._first], tokens[self._first :]
        self._first -= len(first)
        text = self._stream.feed(first)
        self._unheeded += len(text)
        return text + self._stream.feed(others)

    def rest(self, reasoning: str, content: str) -> Said:
        """What the whole has beyond what was told."""
        if reasoning.startswith(self._content.strip()) and not content.startswith(self._content):
            # Thinking that no mark had begun was told as content: what stands behind its end is not lost.
            return Said(_beyond(self._reasoning, reasoning), content)
        if self._content and self._reasoning and not reasoning:
            # It does not follow the template: as a whole it is all text, and so is the thinking in it.
            content = _beyond(self._reasoning, content)
        return Said(_beyond(self._reasoning, reasoning), _beyond(self._content, content))


def _beyond(told: str, whole: str) -> str:
    """What stands behind what was told, with which the whole begins: but for white space that it leaves out,
    or marks that it has because the answer as a whole does not follow the template."""
    if whole.startswith(told):
        return whole[len(told) :]
    begun = told.lstrip()
    if not begun:
        return whole
    found = re.match(_MARKS + re.escape(begun), whole)
    return whole[found.end() :] if found else ""


class Choice:
    """A choice that is collected."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ended: Ended | None = None

    @property
    def token_ids(self) -> list[int]:
        """All sampled tokens."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """One for each."""
        return [value for delta in self.deltas for value in delta.logprobs]

    @property
    def versions(self) -> list[dict[str, int]]:
        """Which policy version sampled which tokens."""
        return versions_of(self.deltas)


def versions_of(deltas: Sequence[Delta]) -> list[dict[str, int]]:
    """Neighbouring spans of one version joined."""
    spans: list[dict[str, int]] = []
    for span in (span for delta in deltas for span in delta.spans):
        last = spans[-1] if spans else None
        if last is not None and last["policy_version"] == span.version:
            last["length"] += span.length
        else:
            spans.append({"start": span.start, "length": span.length, "policy_version": span.version})
    return spans


def tool_calls(ended: Ended, indexed: bool) -> list[dict[str, Any]]:
    """The calls of a message; with their index, as streams have them."""
    calls = []
    for index, call in enumerate(ended.message.tool_calls):
        function = {"name": call.name, "arguments": call.arguments_json}
        said = {"id": call.id, "type": "function", "function": function}
        calls.append({"index": index, **said} if indexed else said)
    return calls
