"""The rows of data files: a line of JSON each, the items of one JSON list, or the rows of a table.

1. Every row has its place: the file where there are several, and the line on which it begins, or its number
   in a table; of a list the item, too, where another begins on that line.
2. A line that is no JSON is given as what is wrong with it, so that it is told with the others; a list ends
   where it is none.
3. Lines and tables are read as they are asked for, compressed ones too; only a list is read whole. A line has
   MAX_LINE_BYTES at most.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from quartet.cli.sft.columns import kind_of, rows_of_columns
from quartet.cli.sft.packed import BROKEN, unpacked
from quartet.config import ConfigError

#: Far more than any model reads, and what a machine holds a few times over.
MAX_LINE_BYTES = 1 << 28
ARCHIVE: Final = b"PK\x03\x04"
#: Tables of text have no types, and no place for a list of messages.
TEXT_TABLES: Final = {".csv": "", ".tsv": r', delimiter="\t"'}
_BEGINNING_BYTES: Final = 8

Row = tuple[str, Any]


def rows_of(files: Sequence[Path], key: str) -> Iterator[Row]:
    """Each row's place and value; a ValueError as the value of one that is none. Raises ConfigError, which
    begins with the key and the file."""
    for file in files:
        within = f"{file}, " if len(files) > 1 else ""
        for place, value in _rows(file, f"{key} = {str(file)!r}"):
            yield within + place, value


def _rows(file: Path, what: str) -> Iterator[Row]:
    try:
        with file.open("rb") as raw:
            beginning = raw.read(_BEGINNING_BYTES)
            raw.seek(0)
            if beginning.startswith(ARCHIVE):
                raise ConfigError(f"{what} is an archive; take the files out of it: unzip '{file}'")
            kind = kind_of(beginning)
            if kind is None:
                yield from _text_rows(unpacked(raw), file, what)
                return
        numbered = enumerate(rows_of_columns(file, kind, what), start=1)
        yield from ((f"row {number}", row) for number, row in numbered)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}") from error
    except BROKEN as error:
        raise ConfigError(f"{what} cannot be read to its end: {error}; write it anew") from error


def _text_table(file: Path, what: str) -> ConfigError:
    """What is said of one."""
    rows = f"csv.DictReader(sys.stdin{TEXT_TABLES[file.suffix.lower()]})"
    return ConfigError(
        f"{what} is a table of text, which is not read; write JSON lines: "
        f"python -c 'import csv, json, sys; [print(json.dumps(row)) for row in {rows}]' "
        f"< {shlex.quote(str(file))} > {shlex.quote(str(file.with_suffix('.jsonl')))}"
    )


def _text_rows(opened: IO[bytes], file: Path, what: str) -> Iterator[Row]:
    is_first = True
    for number, line, end in _lines(opened, what):
        # A line that begins so is no object, and a file of lines has only objects.
        if is_first and line.startswith("["):
            rest = _text(opened.read(), what, end)
            yield from _items(line + rest, number, what)
            return
        if is_first and file.suffix.lower() in TEXT_TABLES and not line.startswith("{"):
            raise _text_table(file, what)
        is_first = False
        try:
            value = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            # The library says "line 1", whichever it is.
            why = (
                f"{error.msg} at letter {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            )
            value = ValueError(f"it is no JSON ({why}); write an object, whole in a line of its own")
        yield f"line {number}", value


def _lines(opened: IO[bytes], what: str) -> Iterator[tuple[int, str, int]]:
    """Lines that are not empty, with their numbers, and the bytes up to their ends."""
    # Not by letters: JSON may have U+2028 and its like within a text.
    number = end = 0
    while line := opened.readline(MAX_LINE_BYTES + 1):
        begins, end, number = end, end + len(line), number + 1
        if len(line) > MAX_LINE_BYTES:
            most = f"{MAX_LINE_BYTES} bytes"
            raise ConfigError(f"{what}, line {number} has more than {most}; write shorter ones")
        text = _text(line, what, begins)
        if number == 1:
            # Some editors begin a file with a mark of its encoding, which JSON does not have.
            text = text.removeprefix("\ufeff")
        if text := text.lstrip():
            yield number, text, end


def _text(given: bytes, what: str, begins: int) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not UTF-8 at byte {begins + error.start}") from error


def _items(text: str, first: int, what: str) -> Iterator[Row]:
    """Of a list that begins the text, which begins on that line."""
    decoder = json.JSONDecoder()
    at, line, counted, number, before = _next(text, 1), first, 0, 0, 0
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{what}, line {line}: an item of the list is no JSON ({error})") from error
        number += 1
        yield f"line {line}" + (f", item {number}" if line == before else ""), value
        before = line
        at = _next(text, at)
        if text[at : at + 1] == ",":
            at = _next(text, at + 1)
        elif text[at : at + 1] != "]":
            raise ConfigError(f"{what}: behind the item of line {line} the list has no comma, and no end")
    if text[at + 1 :].strip():
        raise ConfigError(f"{what}: something stands behind the end of the list")


def _next(text: str, at: int) -> int:
    """The place of the next letter that is no white space."""
    while text[at : at + 1].isspace():
        at += 1
    return at
