"""Answers that come back as the next request's history, as client libraries write them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from quartet.v1 import inference_service_pb2 as pb

from .openai_door import TOOL, Door, requests_seen, say

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER: Any = {"role": "user", "content": "1+1?"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[pb.GenerateRequest]:
    """The requests that the answerer gets."""
    return requests_seen(monkeypatch)


async def test_what_a_client_parsed_may_come_back(
    door: Door, monkeypatch: pytest.MonkeyPatch, sent: list[pb.GenerateRequest]
) -> None:
    """turns.py 1: the stream helper's own dump, and the answer of LiteLLM."""
    say(monkeypatch, door, CALL)
    state: Any = ChatCompletionStreamState(input_tools=[TOOL])
    async for chunk in await door.chat(tools=[TOOL], stream=True, max_tokens=200):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0].message.model_dump()
    assert "parsed_arguments" in streamed["tool_calls"][0]["function"]
    streamed["tool_calls"][0]["function"]["parsed_arguments"] = {"a": 1}  # as `parse` fills it
    (plain_call,) = [{**call, "provider_specific_fields": {}} for call in streamed["tool_calls"]]
    lite = {"role": "assistant", "content": None, "tool_calls": [plain_call]}
    lite["provider_specific_fields"] = {"refusal": None}
    for turn in ({**streamed, "parsed": {"a": 1}}, lite):
        result = {"role": "tool", "tool_call_id": plain_call["id"], "content": "2"}
        await door.chat(messages=[USER, turn, result], max_tokens=2)
        assert [m.role for m in sent[-1].messages.messages] == ["user", "assistant", "tool"]
        assert sent[-1].messages.messages[1].tool_calls[0].arguments_json == '{"a": 1}'


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": "x", "parsed": {}},
        {"role": "assistant", "content": "x", "thinking_blocks": [{}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "", "x": 1}}],
        },
    ],
)
async def test_other_unknown_fields_are_refused(door: Door, turn: dict[str, Any]) -> None:
    """turns.py 1."""
    status, error = await door.refusal(model=door.model, messages=[turn, USER])
    assert (status, error["code"]) == (400, "unsupported_parameter"), error
