"""How a model writes calls whose arguments are JSON, as parts of a grammar in Lark's notation.

1. What a grammar of these derives is read back (`formats`) as exactly the calls that it was made for.
2. A mark that is a special token is named by its id: no text spells it. Any other is text.
3. Formats whose arguments are no JSON, or whose calls are numbered, have no spelling: nothing is enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quartet_inference.structure.grammar import quoted

#: What Lark's notation says of a mark: text, or a special token.
Mark = Callable[[str], str]


@dataclass(frozen=True)
class Spelling:
    """Of one format: `begin`, a call, `end`, and again; where they are a list, one `begin` for all calls."""

    begin: str  # the mark by which text turns into calls; empty: calls are all of an answer
    head: Callable[[str, Mark], str]  # from a call's beginning to its arguments, by the tool's name
    tail: str = ""  # from the arguments to the call's end
    opening: str = ""  # between `begin` and the first call
    end: str = ""  # a mark
    closing: str = ""  # between the last call and `end`
    between: str = ""  # calls
    listed: bool = False

    def calls(self, bodies: Sequence[str], mark: Mark, single: bool, begun: bool = False) -> str:
        """One call or more of these rules; `begun`: what follows the first `begin`."""
        call = f"({' | '.join(bodies)})"
        begin = mark(self.begin) if self.begin else ""
        end = f"{self.closing} {mark(self.end)}" if self.end else self.closing
        if self.listed:
            more = "" if single else f"({self.between} {call})*"
            inner = f"{self.opening} {call} {more} {end}"
            return inner if begun else f"{begin} {inner}"
        one = f"{self.opening} {call} {end}"
        more = "" if single or begun else f"({self.between} {begin} {one})*"
        return f"{one} {more}" if begun else f"{begin} {one} {more}"


def _object(key: str) -> Callable[[str, Mark], str]:
    """{"name": ..., key: ...} up to the arguments."""

    def head(name: str, mark: Mark) -> str:
        words = ['"{"', '"\\"name\\""', '":"', quoted(quoted(name)), '","', quoted(quoted(key)), '":"']
        return " SPACE? ".join(words) + " SPACE?"

    return head


def _named(name: str, mark: Mark) -> str:
    return f"{quoted(name)} {mark('[ARGS]')} SPACE?"


_TAGGED = Spelling(
    "<tool_call>",
    _object("arguments"),
    'SPACE? "}"',
    opening="SPACE?",
    end="</tool_call>",
    closing="SPACE?",
    between="SPACE?",
)
_LISTED = Spelling(
    "[TOOL_CALLS]",
    _object("arguments"),
    'SPACE? "}"',
    opening='SPACE? "[" SPACE?',
    closing='SPACE? "]"',
    between='SPACE? "," SPACE?',
    listed=True,
)


def spelling_of(name: str, template: str) -> Spelling | None:
    """Of a format, as a chat template writes it; None: it has none."""
    if name == "hermes":
        return _TAGGED
    if name == "llama3_json":
        return Spelling("", _object("parameters"), 'SPACE? "}"', between='SPACE? ";" SPACE?', listed=True)
    if name == "mistral":
        return Spelling("[TOOL_CALLS]", _named) if "[ARGS]" in template else _LISTED
    if name == "json_list":
        begin = "functools" if "functools[" in template else "<|tool_call|>"
        end = "<|/tool_call|>" if "<|/tool_call|>" in template else ""
        return replace(_LISTED, begin=begin, end=end)
    return None
