"""TOML as text: what the launcher writes for the services to read (the standard library only reads it).

1. `tomllib.loads(dumps(table)) == table` for every table of strings, booleans, integers, floats, lists and
   tables.
2. `None` is left out, because TOML has no null; any other type is a TypeError.
3. `inline` never breaks a line: its values are arguments of commands and overrides that a user copies. No
   letter of theirs is a command to a terminal.

Not tomli-w, which has no 3 (its arrays take a line for each element) and no 2: what would be left of this
module is the larger part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def _string(text: str) -> str:
    parts = []
    for letter in text:
        if letter in _ESCAPES:
            parts.append(_ESCAPES[letter])
        elif ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0:
            parts.append(f"\\u{ord(letter):04x}")
        else:
            parts.append(letter)
    return '"' + "".join(parts) + '"'


def _key(name: str) -> str:
    return name if name and _BARE.issuperset(name) else _string(name)


def _float(value: float) -> str:
    # By the type itself: what a script says may be of a class that writes itself otherwise (NumPy's).
    text = float.__repr__(value)
    if math.isinf(value) or math.isnan(value):
        return text  # "inf", "-inf" and "nan" are TOML
    return text if "." in text or "e" in text else text + ".0"


def inline(value: object) -> str:
    """A value on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():
            return _float(value)
        case str():
            return _string(value)
        case Path():
            return _string(str(value))
        case Mapping():
            pairs = [f"{_key(str(k))} = {inline(v)}" for k, v in value.items() if v is not None]
            return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
        case list() | tuple():
            return "[" + ", ".join(inline(item) for item in value) + "]"
        case _:
            raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _is_table_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _write(table: Mapping[str, object], prefix: str, lines: list[str]) -> None:
    """The plain keys of a table first, because a key after a sub-table would belong to it."""
    nested: list[tuple[str, object]] = []
    for name, value in table.items():
        if value is None:
            continue
        if isinstance(value, Mapping) or _is_table_list(value):
            nested.append((name, value))
        else:
            lines.append(f"{_key(name)} = {inline(value)}")
    for name, value in nested:
        path = f"{prefix}{_key(name)}"
        if isinstance(value, Mapping):
            lines.append(f"\n[{path}]")
            _write(value, path + ".", lines)
        else:
            assert isinstance(value, list)
            for item in value:
                lines.append(f"\n[[{path}]]")
                _write(item, path + ".", lines)


def dumps(table: Mapping[str, object]) -> str:
    """The table as a TOML document."""
    lines: list[str] = []
    _write(table, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"
