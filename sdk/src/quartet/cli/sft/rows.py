"""The rows of a data file: a line of JSON each, or the items of one JSON list.

1. Every row has the number of the line on which it begins.
2. A line that is no JSON is given as what is wrong with it, so that it is told with the others; a list ends
   where it is none.
3. A file that no library here reads (Parquet, Arrow, compressed ones) is refused with how it is converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from quartet.config import ConfigError
from quartet.config.text import read_text

#: How a file begins, what it is then, and what makes one of it that is read.
UNREAD: Final = (
    (
        b"PAR1",
        "Parquet",
        "python -c \"import pandas; pandas.read_parquet('{file}').to_json('{stem}.jsonl', orient='records', "
        'lines=True)"',
    ),
    (
        b"ARROW1",
        "Arrow",
        "python -c \"import pandas; pandas.read_feather('{file}').to_json('{stem}.jsonl', orient='records', "
        'lines=True)"',
    ),
    (
        b"\xff\xff\xff\xff",
        "Arrow, of the library datasets",
        "python -c \"import datasets; datasets.Dataset.from_file('{file}').to_json('{stem}.jsonl')\"",
    ),
    (b"\x1f\x8b", "compressed", "gunzip -k '{file}'"),
    (b"\x28\xb5\x2f\xfd", "compressed", "zstd -d '{file}'"),
    (b"\xfd7zXZ", "compressed", "xz -dk '{file}'"),
    (b"PK\x03\x04", "an archive", "unzip '{file}'"),
)
_BEGINNING: Final = max(len(begins) for begins, _, _ in UNREAD)


def rows_of(file: Path, key: str) -> Iterator[tuple[int, Any]]:
    """Each row's line and value; a ValueError as the value of one that is none. Raises ConfigError, which
    begins with the key that names the file."""
    what = f"{key} = {str(file)!r}"
    _check_kind(file, what)
    # Some editors begin a file with a mark of its encoding, which JSON does not have.
    text = read_text(file, what).removeprefix("\ufeff")
    # A line that begins so is no object, and a file of lines has only objects.
    return _items(text, what) if text.lstrip().startswith("[") else _lines(text)


def _check_kind(file: Path, what: str) -> None:
    if file.is_dir():
        raise ConfigError(f"{what} is a folder; name a file in it")
    try:
        with file.open("rb") as opened:
            beginning = opened.read(_BEGINNING)
    except OSError:
        return  # read_text says why
    for begins, kind, convert in UNREAD:
        if beginning.startswith(begins):
            how = convert.format(file=file, stem=file.with_suffix(""))
            raise ConfigError(f"{what} is {kind}, and JSON lines are read; convert it: {how}")


def _lines(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines: JSON may have U+2028 and its like within a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, ValueError(f"it is no JSON ({error}); write an object, whole in a line of its own")


def _items(text: str, what: str) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    at, line, counted = _next(text, text.index("[") + 1), 1, 0
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{what}, line {line}: an item of the list is no JSON ({error})") from error
        yield line, value
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
