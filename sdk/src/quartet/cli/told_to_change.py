"""The arguments of a command that is to be given again, after an error that told to change one of them.

1. An option whose key the error names has VALUE in place of what was said: to say the same again would meet
   the same error. What the error means by the key, it says itself.
2. A key is named by itself, or with the tables that it is in (`timeout_seconds`, `env.timeout_seconds`), as
   no other word could be: with a dot or an underscore in it, or with ` = ` behind it.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quartet.cli.dialects import items

#: In place of a value that is to be another.
OPEN = "VALUE"

_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_NAMED = re.compile(r"(?<![\w./])(?P<key>[a-z]\w*(?:\.\w+)*)(?P<valued> = )?")


def to_say_again(arguments: Sequence[str], error: str) -> list[str]:
    """The arguments, those open that the error told to change."""
    named = {
        _tables(found["key"].split("."))
        for found in _NAMED.finditer(_HYPHEN.sub("_", error))
        if found["valued"] or "_" in found["key"] or "." in found["key"]
    }
    again: list[str] = []
    for item in items(list(arguments)):
        key = _tables(item.key)
        meant = any(key[at:] in named for at in range(len(key)))
        again += _opened(item.tokens) if meant and not item.file else item.tokens
    return again


def _tables(key: Sequence[str]) -> tuple[str, ...]:
    """Without the numbers of a list's tables, which an error has no use for."""
    return tuple(part for part in key if not part.isdecimal())


def _opened(tokens: Sequence[str]) -> Sequence[str]:
    """An option without a value, such as `--no-eval.before`, says what it says by its name."""
    name, equals, _ = tokens[0].partition("=")
    return (name, OPEN) if equals or len(tokens) > 1 else tokens
