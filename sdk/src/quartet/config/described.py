"""What the keys of a configuration mean, for help: as its models' sources say it, in the `#:` comments above
their fields.

1. Every key has a line with its default, or with what it may be where it has none, or some values alone are
   possible; under it stands what its comment says.
2. Where a source cannot be read its keys have no comments.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import typing
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic_core import PydanticUndefined

from quartet.config.keys import Choice, alternatives, known_keys
from quartet.config.model import Config

WIDTH: Final = 100
_COMMENT: Final = re.compile(r"    #: (.*)")
_FIELD: Final = re.compile(r"    (\w+): ")
_WORDS: Final[dict[Any, str]] = {
    str: "text", Path: "path", int: "integer", float: "number", bool: "true or false",
    list: "list", tuple: "list", dict: "table",
}  # fmt: skip


def described(model: type[Config], below: str = "", option: str = "") -> list[str]:
    """The lines of every key below a table, or of the key of that name; `option` stands before each."""
    lines: list[str] = []
    for key, (owner, name) in known_keys(model).items():
        if below and key != below and not key.startswith(f"{below}."):
            continue
        field = owner.model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data={})
        given = default is not None and default is not PydanticUndefined
        kind = _kind(field.annotation, only_choices=given)
        shown = f" = {_written(default)}" if given else ""
        lines.append(f"  {option}{key}{shown}" + (f"    ({kind})" if kind else ""))
        lines += textwrap.wrap(
            _comments(owner).get(name, ""), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return lines


@cache
def _comments(model: type[Any]) -> dict[str, str]:
    """Of each field, those of the models that it inherits from included."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, Config) or one is Config:
            continue
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):  # its file is not there, or it never had one
            continue
        above: list[str] = []
        for line in source.splitlines():
            if comment := _COMMENT.fullmatch(line):
                above.append(comment[1])
                continue
            if above and (field := _FIELD.match(line)):
                found[field[1]] = " ".join(above)
            above = []
    return found


def _written(value: Any) -> str:
    """As TOML has it."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {_written(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _kind(annotation: Any, *, only_choices: bool) -> str:
    """What it may be, in words; `only_choices`: where its default says the rest. Empty where words fail."""
    words: list[str] = []
    for one in alternatives(annotation):
        if isinstance(one, Choice):
            words += [_written(value) for value in one.values]
        elif one is not type(None):
            words.append("" if only_choices else _WORDS.get(typing.get_origin(one) or one, ""))
    return " | ".join(dict.fromkeys(words)) if all(words) else ""
