"""A response and the items of its output, as the Responses API writes them.

1. One turn is at most one item of thinking, one message and its calls, in this order. There is no message
   beside calls that no text precedes, nor where the answer was cut off while the model thought.
2. Whatever ends by itself is completed. An answer that was cut off is incomplete, and so is its last item.
3. A call's `call_id` is what its output names; ids are new with each item and mean nothing to the server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quartet.kit.fresh import fresh_id
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.answering import Ended
from quartet_inference.openai.bodies import ChatBody
from quartet_inference.openai.responses.body import ResponsesBody
from quartet_inference.openai.responses.items import carried

Item = dict[str, Any]

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
# What a kind of item has beside its text.
_FORMS: dict[str, Item] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}


def begun(kind: str) -> Item:
    """Thinking or a message, of which nothing is told yet."""
    return {**_new(kind), "status": "in_progress", **_FORMS[kind], "content": []}


def part_of(kind: str, text: str, logprobs: Sequence[Item] = ()) -> Item:
    """The text of such an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def said(item: Item, text: str, logprobs: Sequence[Item] = (), carry: bool = False) -> Item:
    """Such an item in the end. `carry`: its thinking in a form to be carried along, too."""
    more = {"encrypted_content": carried(text)} if carry and item["type"] == "reasoning" else {}
    return {**item, "status": "completed", "content": [part_of(item["type"], text, logprobs)], **more}


def output_of(
    ended: Ended, logprobs: Sequence[Item], carry: bool, told: Mapping[str, Item] = MappingProxyType({})
) -> list[Item]:
    """The items of a turn; `told` are those that a stream has begun, by kind, in its order."""
    message, cut = ended.message, ended.reason == pb.FINISH_REASON_LENGTH
    texts = {"reasoning": message.reasoning_content, "message": message.content}
    may_be_silent = not message.tool_calls and not (cut and message.reasoning_content)
    there = {"reasoning": bool(message.reasoning_content), "message": bool(message.content) or may_be_silent}
    kinds = [*told, *(kind for kind in texts if there[kind] and kind not in told)]
    output = [said(told.get(kind) or begun(kind), texts[kind], logprobs, carry) for kind in kinds]
    output += [_call(call) for call in message.tool_calls]
    if cut and output:
        output[-1]["status"] = "incomplete"
    return output


def _new(kind: str) -> Item:
    return {"id": f"{_PREFIXES[kind]}_{fresh_id()}", "type": kind}


def _call(call: common_pb2.ToolCall) -> Item:
    told = {"call_id": call.id, "name": call.name, "arguments": call.arguments_json}
    return {**_new("function_call"), "status": "completed", **told}


def framed(asked: ResponsesBody, chat: ChatBody, fingerprint: str) -> Item:
    """A response of which nothing is said yet: what was asked, told back."""
    return {
        "id": f"resp_{fresh_id()}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions or None,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "system_fingerprint": fingerprint,
        "temperature": 1.0 if chat.temperature is None else chat.temperature,
        "text": {"format": asked.text.format},
        "tool_choice": asked.tool_choice,
        "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in asked.tools],
        "top_logprobs": asked.top_logprobs,
        "top_p": 1.0 if chat.top_p is None else chat.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def closed(frame: Item, output: Sequence[Item], ended: Ended, usage: Item) -> Item:
    """The whole response (2)."""
    cut = ended.reason == pb.FINISH_REASON_LENGTH
    return {
        **frame,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": usage,
    }
