"""Rendering by a chat template that may take the arguments of calls as JSON text alone (DeepSeek-V3's), in
one way for whoever serves and whoever trains.

1. What the template refuses is tried once more with all arguments as text. Where that is refused, too, or is
   the same, the template's first reason is what is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

Message = Mapping[str, Any]

#: What a template raises that cannot work with what it is given, beside its library's own errors.
REFUSALS: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefused(ValueError):
    """The template's own reason."""


def rendered(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], own_error: type[Exception]
) -> str:
    """What `render` makes of the messages; `own_error` is that of the templates' library. Raises
    TemplateRefused."""
    refusals = (own_error, *REFUSALS)
    try:
        return render(messages)
    except refusals as error:
        as_text = [with_text_arguments(message) for message in messages]
        if as_text != list(messages):
            with suppress(*refusals):
                return render(as_text)
        raise TemplateRefused(str(error)) from error


def with_text_arguments(message: Message) -> Message:
    """The message; arguments that are a text already, be they JSON or not, stay as they are."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
