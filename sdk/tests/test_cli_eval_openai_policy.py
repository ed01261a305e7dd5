"""What an endpoint answers, as the policy's answer (quartet.cli.eval.openai_policy)."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from quartet.cli.eval.openai_policy import answer_of


def answered(message: dict[str, Any]) -> ChatCompletion:
    """A completion as the client library reads it from a server."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return ChatCompletion.model_validate(body)


@pytest.mark.parametrize(
    ("thinking", "read"),
    [
        ({"reasoning_content": "so"}, "so"),
        ({"reasoning": "so"}, "so"),
        ({"reasoning_content": None, "reasoning": "so"}, "so"),
        ({"reasoning": None}, ""),
        ({}, ""),
    ],
)
def test_thinking_is_read_under_both_of_its_names(thinking: dict[str, Any], read: str) -> None:
    """openai_policy.py 3."""
    message = answer_of(answered({"content": "4", **thinking})).message
    assert (message.content, message.reasoning_content) == ("4", read)
