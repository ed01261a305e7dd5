"""How calls of tools are found in a text, whatever the format that they are written in.

1. A format finds its calls in a text and returns the text without them; what cannot be read as a call stays
   in the text.
2. `markers` are the beginnings of its calls: text from the first of them on is not told while it is written.
3. Reading takes time in proportion to the text, whatever a model writes: of MAX_MISREAD beginnings that are
   none, the rest of the text is not looked into, and each is read once, from its beginning to its end.
4. A value of a parameter ends at the first mark that ends values; one that is JSON and may be, behind it: its
   strings may contain that mark. Behind MAX_MISREAD values that begin like JSON and are none, none is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quartet_inference.chat.calls import ParsedCall, json_before, skip_space
from quartet_inference.chat.schemas import Schemas, is_text

#: Beginnings that could not be read. Who writes more repeats himself, and one reading of a long text may take
#: tens of milliseconds.
MAX_MISREAD = 64
#: Of strings, arrays and objects.
_JSON_BEGINS = ('"', "[", "{")


@dataclass
class Reading:
    """What is known of the tools, and what of a text could not be read."""

    schemas: Schemas
    misread: int = 0  # beginnings of calls
    misread_json: int = 0  # of values of parameters

    def value(self, text: str, at: int, mark: str, schema: Any) -> tuple[str, int]:
        """The value of a parameter that begins here, and the position behind the mark that ends it."""
        if self.misread_json < MAX_MISREAD and not is_text(schema):
            start = skip_space(text, at)
            if text[start : start + 1] in _JSON_BEGINS:
                try:
                    end = json_before(text, start, mark)
                except ValueError:
                    self.misread_json += 1
                else:
                    return text[at:end], end + len(mark)
        return until(text, at, mark)


#: Reads the calls that begin behind a marker: (text, position, reading) -> (calls, end); else ValueError.
ReadAt = Callable[[str, int, Reading], tuple[list[ParsedCall], int]]


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    begins: re.Pattern[str]
    markers: tuple[str, ...]
    read_at: ReadAt
    #: The marks that some tokenizers have as special tokens, which texts leave out otherwise.
    special: tuple[str, ...] = ()
    #: The character with which a whole answer that is nothing but calls begins.
    bare: str = ""

    def read(self, text: str, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """The text without its calls, and the calls."""
        kept: list[str] = []
        calls: list[ParsedCall] = []
        reading = Reading(schemas)
        done = 0
        at = 0
        while reading.misread < MAX_MISREAD and (found := self.begins.search(text, at)) is not None:
            try:
                read, end = self.read_at(text, found.end(), reading)
            except ValueError:
                at = max(found.end(), at + 1)
                reading.misread += 1
                continue
            kept.append(text[done : found.start()])
            calls.extend(read)
            done = at = end
        kept.append(text[done:])
        content = "".join(kept)
        if calls:  # what stands before them may be told by now, as it is
            content = content.rstrip() if kept[0].strip() else content.strip()
        return content, calls


def until(text: str, at: int, mark: str) -> tuple[str, int]:
    """What stands before the mark, and the position behind it."""
    end = text.find(mark, at)
    if end < 0:
        raise ValueError(f"no {mark}")
    return text[at:end], end + len(mark)


def close(text: str, at: int, mark: str) -> int:
    """Behind the closing mark; a text may end without it."""
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if at == len(text):
        return at
    raise ValueError(f"no {mark}")


def skip_mark(text: str, at: int, mark: str) -> int:
    """Behind the mark where it stands next; else the same position."""
    after = skip_space(text, at)
    return after + len(mark) if text.startswith(mark, after) else at
