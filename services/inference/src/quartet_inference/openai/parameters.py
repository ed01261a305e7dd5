"""The parameters of a body: which are served, and which may stand beside them.

1. A parameter is served, or it is harmless (it names the caller, or asks for what is done anyway), or it is
   refused by name. None is ignored.
2. `null` is the same as leaving a parameter out.
3. No parameter is nested deeper than MAX_DEPTH: what was parsed can be written again, whoever does it.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import pydantic

from quartet_inference.openai.errors import OpenAiError, malformed, unsupported

#: They say who asks, or how an answer is kept and billed elsewhere.
HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "safety_identifier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "service_tier",
        "request_id",
        "spaces_between_special_tokens",
    }
)
#: Accepted with these values only, because they ask for what is done anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "priority": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "bad_words": ([],),
}
#: Parts of pydantic's places that no client sent: which member of a union was tried.
_BRANCHES = frozenset({"str", "int", "float", "bool"})
#: Where pydantic names our classes, or counts from 1.
_SHAPES = {"model_type": "Input should be an object", "too_short": "Input should not be empty"}
#: An escape for half a surrogate pair: with its other half behind it a character, alone no text.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
#: Of lists and objects in a parameter. Python's own limit is about 1000 less its caller's depth, so that a
#: body parsed in a thread could not be written again on the event loop; no schema in use comes near this one.
MAX_DEPTH = 256
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels; send a flatter one"
#: Of a value, in an error.
_SHOWN_CHARS = 80
T = TypeVar("T", bound=pydantic.BaseModel)


def json_object(raw: bytes) -> dict[str, Any]:
    """The body, without what is null. Raises OpenAiError."""
    try:
        text = raw.decode()
        body = json.loads(text)
        if _HALF_PAIR.search(text):
            json.dumps(body, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, of half a pair
    except ValueError as error:
        raise OpenAiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    except RecursionError:  # so deep that it was not read on, be it JSON or not
        raise OpenAiError(400, f"the body {_TOO_DEEP}", code="invalid_value") from None
    if not isinstance(body, dict):
        raise OpenAiError(400, "the body should be a JSON object", code="invalid_json")
    for name, value in body.items():
        if _depth(value) > MAX_DEPTH:
            raise malformed(name, _TOO_DEEP)
    return without_nulls(body)


def served(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The fields that are served. Raises OpenAiError for others that are not harmless."""
    for name in sorted(fields.keys() - names - HARMLESS):
        if name not in NEUTRAL:
            raise unsupported(name, "leave it out")
        if not any(fields[name] == value for value in NEUTRAL[name]):
            raise unsupported(name, f"leave it out ({_short(fields[name])} was given)")
    return {name: value for name, value in fields.items() if name in names}


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Null is the same as nothing."""
    return {name: value for name, value in fields.items() if value is not None}


def validated(body: type[T], fields: dict[str, Any], where: str = "") -> T:
    """The fields, checked; `where` they stand in the request. Raises OpenAiError."""
    try:
        return body.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = where
        for part in first["loc"]:
            if isinstance(part, int):
                name += f"[{part}]"
            elif part in _BRANCHES or "[" in part or "-" in part:
                continue
            else:
                name += f".{part}" if name else part
        if first["type"] == "extra_forbidden":
            raise unsupported(name, "leave it out") from None
        raise malformed(name, _SHAPES.get(first["type"], first["msg"])) from None


def _depth(value: Any) -> int:
    """How many lists and objects stand in one another, level by level; counted to MAX_DEPTH and one."""
    level: list[Any] = [[value]]
    depth = -1
    while level and depth <= MAX_DEPTH:
        inside = (inner for one in level for inner in (one.values() if isinstance(one, dict) else one))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
        depth += 1
    return depth


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
