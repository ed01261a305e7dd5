"""What a model said in `quartet env check`: one conversation, shortened, with what it earned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quartet.cli.env.checking import Played
from quartet.cli.eval.rows import failure_kind
from quartet.kit.standard_streams import shown
from quartet.v1.common_pb2 import Message

#: Of a longer conversation its begin and its end, so many messages each.
HALF_MESSAGES = 4
#: Of a longer text its begin and its end, so many letters each: some three lines of a terminal.
HALF_CHARS = 150


def conversation_lines(played: Played) -> list[str]:
    """The first rollout with a reward that has messages, else the first that failed; empty where none has."""
    for task, one in [*played.results, *played.failures]:
        if one.messages:
            earned = failure_kind(one) if one.HasField("failure") else f"reward {one.reward:.3f}"
            return [f"  what was said at example {task.index} ({earned}):", *_lines(one.messages)]
    return []


def _lines(messages: Sequence[Message]) -> Iterator[str]:
    left_out = len(messages) - 2 * HALF_MESSAGES
    for at, message in enumerate(messages):
        if left_out <= 0 or at < HALF_MESSAGES or at >= len(messages) - HALF_MESSAGES:
            yield from (f"    {shown(message.role):<10} {text}" for text in _texts(message))
        elif at == HALF_MESSAGES:
            yield f"    … {left_out} more messages …"


def _texts(message: Message) -> Iterator[str]:
    if message.reasoning_content:
        yield f"(thinking) {_short(message.reasoning_content)}"
    if message.content or not message.tool_calls:
        yield _short(message.content) or "(nothing)"
    for call in message.tool_calls:
        yield f"calls {_short(call.name)}({_short(call.arguments_json)})"


def _short(text: str) -> str:
    line = " ".join(shown(text).split())
    return line if len(line) <= 2 * HALF_CHARS else f"{line[:HALF_CHARS]} … {line[-HALF_CHARS:]}"
