"""What a script gives as data: the path of files, or rows, which then become a file of their own.

1. Rows that are not of a list (those of the library datasets) are columns underneath: a null in an object is
   a key that the row does not have (quartet.cli.sft.columns).
2. The file of the same rows is the same: a fine-tuning that goes on finds what it was begun with, and one
   that is given others is refused before it has lost its own.
3. While it is read, it is its script's: another one with the same output folder is refused before it has
   written rows of its own into it.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quartet.cli.held import held
from quartet.cli.sft.columns import without_nulls
from quartet.config.model import ConfigError

#: Beside the output folder, of the files that are made of rows.
SUFFIX = ".data"


def path_of(name: str, given: Any, output: Path) -> Path:
    """Where the data are, or will be once they are written. Raises ConfigError."""
    if isinstance(given, str | Path):
        return Path(given)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise ConfigError(
            f"{name} = {kind} is refused: give the path of a file, a folder or a pattern, a list of rows, or "
            "one set of the library datasets"
        )
    if not isinstance(given, Sized):
        raise ConfigError(
            f"{name} = {type(given).__name__} is refused: all rows are written to a file first, and nobody "
            f"knows how many these are; give list({name}), or of a stream the first, list({name}.take(1000))"
        )
    return _folder(output) / f"{name}.jsonl"


@contextmanager
def written(given: Mapping[str, Any], output: Path, *, goes_on: bool = False) -> Iterator[None]:
    """Rows, by the names that `path_of` knows them by, are there while inside, and nobody else's. Raises
    ConfigError."""
    rows = {name: one for name, one in given.items() if one is not None and not isinstance(one, str | Path)}
    if not rows:
        yield
        return
    folder, refusal = _folder(output), f"args.output_dir {output} belongs to a fine-tuning that is going on"
    with ExitStack() as opened:
        try:
            opened.enter_context(held(folder, f"{refusal}; wait for its end, or name another"))
        except OSError as error:
            raise _no_room(" and ".join(rows), folder, error) from error
        for name, one in rows.items():
            write(name, one, output, goes_on=goes_on)
        yield


def write(name: str, given: Any, output: Path, *, goes_on: bool = False) -> None:
    """Write rows where `path_of` says. Raises ConfigError."""
    file = path_of(name, given, output)
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".new")
    try:
        _write_rows(name, given, made)
        if goes_on and file.exists() and not filecmp.cmp(made, file, shallow=False):
            raise ConfigError(
                f"{name} is another one than {output} was begun with ({file}); give the same rows, or name "
                "another args.output_dir"
            )
        made.replace(file)
    except OSError as error:  # a full disk does not say of which file
        raise _no_room(name, file, error) from error
    finally:
        made.unlink(missing_ok=True)


def _folder(output: Path) -> Path:
    return output.with_name(output.name + SUFFIX)


def _no_room(name: str, place: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{name} cannot be written to {place}: {error.strerror}; make room there, or name another "
        "args.output_dir"
    )


def _write_rows(name: str, given: Iterable[Any], file: Path) -> None:
    with file.open("w", encoding="utf-8") as opened:
        for number, row in enumerate(given, start=1):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{name}, row {number} is {type(row).__name__}; write a dict of columns")
            kept = row if isinstance(given, list) else without_nulls(dict(row))
            try:
                opened.write(json.dumps(kept, ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name}, row {number} has what JSON does not have: {error}") from error
