"""What a request asks of an answer's form and nothing here enforces: it is refused, or taken as a wish.

Forms are enforced where the tokenizer's tokens can follow a grammar (`structure.vocabulary`), and calls of
tools where the model writes them in a form that one is made for (`chat.spelling`). Elsewhere frameworks ask
all the same, without being told to (`strict` of every tool, `tool_choice` "required" in loops of agents), and
check what comes back themselves.

1. Each is refused by name, unless the configuration's `best_effort` takes it as a wish.
2. A wish changes nothing: prompt and tokens are those of the request without it. The answer names the
   wishes in the header WISHES_HEADER.
3. Only the known forms are wishes. Anything else in their places is checked as ever.
4. Where the model's calls cannot be said, an answer's form cannot either while it may call tools: the form
   would forbid the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quartet_inference.openai.errors import unsupported

WISHES_HEADER = "X-Quartet-Not-Enforced"
_FORMATS = ("json_object", "json_schema")
_EXTRA = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_CHOICES = ("function", "allowed_tools")  # of objects; of words "required"


@dataclass(frozen=True)
class Wishing:
    """What is enforced, and what becomes of the rest."""

    best_effort: bool = False
    calls_enforced: bool = True
    answers_enforced: bool = True  # of chat, without tools
    forms_enforced: bool = True  # from the first token on


def without_wishes(fields: dict[str, Any], wishing: Wishing) -> tuple[dict[str, Any], list[str]]:
    """A request of chat without its wishes, and their names. Raises OpenAiError for the first refused."""
    return _without(fields, _wishes(fields, wishing), wishing)


def without_forms(fields: dict[str, Any], wishing: Wishing) -> tuple[dict[str, Any], list[str]]:
    """The same of a request for a completion, which has no calls."""
    return _without(fields, [] if wishing.forms_enforced else _of_forms(fields, "leave it out"), wishing)


def _without(
    fields: dict[str, Any], wishes: list[tuple[str, str]], wishing: Wishing
) -> tuple[dict[str, Any], list[str]]:
    left = dict(fields)
    named: list[str] = []
    for name, remedy in wishes:
        if not wishing.best_effort:
            raise unsupported(name, f"{remedy}, or have the server take it as a wish (openai.best_effort)")
        named.append(name)
        left.pop(name, None)
    if any(name.startswith("tools[") for name in named):
        left["tools"] = [_not_strict(tool) for tool in fields["tools"]]
    return left, named


def _wishes(fields: dict[str, Any], wishing: Wishing) -> list[tuple[str, str]]:
    """Their names, and what to send instead."""
    may_call = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    found = [] if wishing.calls_enforced else _of_calls(fields, may_call)
    if not (wishing.calls_enforced if may_call else wishing.answers_enforced):
        found += _of_forms(fields, "leave it out, or send no tools" if may_call else "leave it out")
    return found


def _of_calls(fields: dict[str, Any], may_call: bool) -> list[tuple[str, str]]:
    found = []
    for index, tool in enumerate(_list(fields.get("tools"))):
        if _function(tool).get("strict") is True:
            found.append(
                (f"tools[{index}].function.strict", "send false: this model's calls cannot be enforced")
            )
    choice = fields.get("tool_choice")
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in _CHOICES):
        found.append(("tool_choice", 'choose "auto" or "none"'))
    if may_call and fields.get("parallel_tool_calls") is False:
        found.append(("parallel_tool_calls", "leave it out: the model may call several tools"))
    return found


def _of_forms(fields: dict[str, Any], remedy: str) -> list[tuple[str, str]]:
    form = fields.get("response_format")
    found = [("response_format", remedy)] if isinstance(form, dict) and form.get("type") in _FORMATS else []
    return found + [(name, remedy) for name in _EXTRA if fields.get(name) is not None]


def _not_strict(tool: Any) -> Any:
    function = _function(tool)
    return {**tool, "function": {**function, "strict": False}} if function.get("strict") is True else tool


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
