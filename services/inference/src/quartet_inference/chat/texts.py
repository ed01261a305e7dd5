"""Texts that a schema allows, as regular expressions in Lark's notation.

1. Each text that all of them match is one that the schema allows.
2. A pattern is anchored as a whole, at neither end or at either; a format is one of FORMATS. Anything else is
   refused (INVALID_REQUEST) with the keyword.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quartet.errors import QuartetError, refused

from quartet_inference.chat.schemas import ANNOTATIONS

FIELD = "tools.parameters_json"
ANY = "/(.|\\n)*/"
#: What Python strips, in the notation of regular expressions: more than their own white space.
SPACES = "[\\s\\x1c-\\x1f]*"
_KEYWORDS = {"type", "minLength", "maxLength", "pattern", "format"}

_DAYS = "(0[1-9]|1[0-9]|2[0-8])"  # of any month; of no February more, whatever the year
_DATE = (
    f"[0-9]{{4}}-((0[1-9]|1[0-2])-{_DAYS}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
)  # fmt: skip
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_WORD = "[A-Za-z0-9_+-]{1,60}"
#: Of JSON Schema; each text of one is valid, and not each that is valid is one.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "hostname": f"{_LABEL}(\\.{_LABEL}){{0,3}}",
    "email": f"{_WORD}(\\.{_WORD}){{0,3}}@{_LABEL}(\\.{_LABEL}){{1,3}}",
    "uri": "[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:\\/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}

#: What would end a regular expression in Lark's notation, with what escapes it; pairs, as each may escape.
_ENDING = re.compile(r"\\.|[/\n]", re.DOTALL)
_UNENDING = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def regexes(schema: Mapping[str, Any]) -> list[str]:
    """What a text of the schema has to match. Errors: INVALID_REQUEST."""
    for keyword in sorted(schema.keys() - ANNOTATIONS - _KEYWORDS):
        raise unsaid(keyword)
    found = []
    least, most = length_of(schema, "minLength", "maxLength")
    if least or most is not None:
        found.append(f"/(.|\\n){{{least},{'' if most is None else most}}}/")
    if "pattern" in schema:
        found.append(_pattern(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in list(FORMATS):
            raise refused(FIELD, f"format {schema['format']}", f"choose of {', '.join(FORMATS)}")
        found.append(f"/{FORMATS[schema['format']]}/")
    return found or [ANY]


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise refused(FIELD, f"pattern {pattern}", "send a regular expression")
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1
    if (begins or ends) and _alternates(pattern):
        raise refused(FIELD, f"pattern {pattern}", "put brackets around alternatives between ^ and $")
    body = pattern[begins : len(pattern) - ends]
    body = _ENDING.sub(lambda one: _UNENDING.get(one[0], one[0]), body)
    before, after = "" if begins else "(.|\\n)*", "" if ends else "(.|\\n)*"
    return f"/{before}({body}){after}/"


def _alternates(pattern: str) -> bool:
    """Whether it has alternatives that no bracket encloses."""
    depth, at, in_class = 0, 0, False
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter == "|" and depth == 0:
            return True
        else:
            depth += {"(": 1, ")": -1}.get(letter, 0)
        at += 1
    return False


def length_of(schema: Mapping[str, Any], at_least: str, at_most: str) -> tuple[int, int | None]:
    """The bounds of a length, by the keywords that say them. Errors: INVALID_REQUEST."""
    least, most = schema.get(at_least, 0), schema.get(at_most)
    if not isinstance(least, int) or least < 0 or not (most is None or isinstance(most, int)):
        raise refused(FIELD, f"{least} to {most}", f"choose numbers for {at_least} and {at_most}")
    if most is not None and most < least:
        raise refused(FIELD, f"{least} to {most}", f"choose an {at_most} that {at_least} allows")
    return least, most


def unsaid(keyword: str) -> QuartetError:
    """The error of a keyword that no rule can say."""
    return refused(FIELD, keyword, "leave it out: it cannot be enforced in this model's format of calls")


def escaped(text: str) -> str:
    """As a regular expression in Lark's notation."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)
