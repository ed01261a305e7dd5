"""Calls for a template that takes arguments as text (quartet.calls_as_text)."""

from __future__ import annotations

from quartet.calls_as_text import with_text_arguments


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
