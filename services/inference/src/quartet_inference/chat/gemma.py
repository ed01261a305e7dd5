"""Gemma 4's calls: `call:name{key:value,...}`, with texts between marks of their own.

1. What is not so written, or has a key twice, raises ValueError, and nothing else is raised, however deep or
   long the text.
2. Reading takes time in proportion to the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from quartet_inference.chat.calls import ParsedCall, skip_space

#: Around a text, on both sides.
QUOTE: Final = '<|"|>'
#: Lists and objects in each other.
MAX_DEPTH: Final = 64
_HEAD = re.compile(r"\s*call:([^\s{}<>]+)\s*(?=\{)")
_KEY = re.compile(r"([^\s:,{}\[\]<>\"]+)\s*(?=:)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=\s*[,}\]])")
#: As templates print them, JSON's and Python's.
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_WORD = re.compile(r"[A-Za-z]+(?=\s*[,}\]])")


def braced_call(text: str, at: int) -> tuple[ParsedCall, int]:
    """The call that begins here, and where it ends."""
    head = _HEAD.match(text, at)
    if head is None:
        raise ValueError("no call")
    arguments, end = _value(text, head.end(), MAX_DEPTH)
    return ParsedCall(head[1], arguments), end


def _value(text: str, at: int, depth: int) -> tuple[str, int]:
    """A value in JSON, and where it ends."""
    at = skip_space(text, at)
    if text.startswith(QUOTE, at):
        said, end = _quoted(text, at)
        return json.dumps(said, ensure_ascii=False), end
    if text[at : at + 1] == "{":
        return _listed(text, at, "}", depth, partial(_member, keys=set()))
    if text[at : at + 1] == "[":
        return _listed(text, at, "]", depth, _value)
    if number := _NUMBER.match(text, at):
        return number[0], number.end()
    word = _WORD.match(text, at)
    if word is None or word[0].lower() not in _WORDS:
        raise ValueError("no value")
    return _WORDS[word[0].lower()], word.end()


def _member(text: str, at: int, depth: int, keys: set[str]) -> tuple[str, int]:
    """One of an object that has these keys before it."""
    if text.startswith(QUOTE, at):
        key, end = _quoted(text, at)
        end = skip_space(text, end)
    elif found := _KEY.match(text, at):
        key, end = found[1], found.end()
    else:
        raise ValueError("no key")
    if key in keys:
        raise ValueError("a key twice")
    keys.add(key)
    if text[end : end + 1] != ":":
        raise ValueError("no value")
    value, end = _value(text, end + 1, depth)
    return f"{json.dumps(key, ensure_ascii=False)}: {value}", end


def _listed(
    text: str, at: int, close: str, depth: int, read: Callable[[str, int, int], tuple[str, int]]
) -> tuple[str, int]:
    if depth == 0:
        raise ValueError("too deep")
    opening, at = text[at], skip_space(text, at + 1)
    found: list[str] = []
    while text[at : at + 1] != close:
        if found:
            if text[at : at + 1] != ",":
                raise ValueError("no comma")
            at = skip_space(text, at + 1)
        one, at = read(text, at, depth - 1)
        found.append(one)
        at = skip_space(text, at)
    return f"{opening}{', '.join(found)}{close}", at + 1


def _quoted(text: str, at: int) -> tuple[str, int]:
    start = at + len(QUOTE)
    end = text.find(QUOTE, start)
    if end < 0:
        raise ValueError("no end of a text")
    return text[start:end], end + len(QUOTE)
