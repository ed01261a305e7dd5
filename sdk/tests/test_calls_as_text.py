"""Calls for a template that takes arguments as text (quartet.calls_as_text)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from quartet.calls_as_text import TemplateRefused, rendered, with_text_arguments

CALL = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]}


class OwnError(Exception):
    """Of the templates' library."""


@pytest.mark.parametrize("error", [OwnError, TypeError, KeyError, RecursionError])
def test_promise_1_what_is_refused_is_tried_as_text_and_its_first_reason_is_told(
    error: type[Exception],
) -> None:
    asked: list[Any] = []

    def render(messages: Sequence[Any]) -> str:
        asked.append(messages[0].get("tool_calls"))
        said = messages[0]["tool_calls"][0]["function"]["arguments"] if asked[-1] else None
        if said == json.dumps({"a": 1}):
            return "as text"
        raise error(f"refused {len(asked)}")

    assert rendered(render, [CALL], OwnError) == "as text" and len(asked) == 2
    asked.clear()
    with pytest.raises(TemplateRefused, match="refused 1"):
        rendered(render, [{"content": "x"}], OwnError)
    assert len(asked) == 1, "it would be the same"
    asked.clear()
    with pytest.raises(TemplateRefused, match="refused 1"):
        rendered(render, [{**CALL, "tool_calls": [{"function": {"arguments": {}}}]}], OwnError)
    assert len(asked) == 2
    with pytest.raises(OSError, match="no refusal"):
        rendered(lambda _: (_ for _ in ()).throw(OSError("no refusal")), [CALL], OwnError)


def test_arguments_become_text_once() -> None:
    """One that is a text by then, of which a model may have made anything, is not written as JSON again."""
    given = ({"city": "Köln"}, '{"city": "Bonn"}', "{no json")
    calls = [{"id": str(at), "function": {"name": "f", "arguments": one}} for at, one in enumerate(given)]
    message = with_text_arguments({"role": "assistant", "tool_calls": calls})
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [
        '{"city": "Köln"}',
        '{"city": "Bonn"}',
        "{no json",
    ]
    assert [one["id"] for one in message["tool_calls"]] == ["0", "1", "2"]
    assert calls[0]["function"] == {"name": "f", "arguments": {"city": "Köln"}}, "what was given stays"
    assert with_text_arguments(message) == message
    for without in ({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": None}):
        assert with_text_arguments(without) is without
