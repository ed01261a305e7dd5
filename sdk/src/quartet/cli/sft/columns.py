"""Rows of Parquet and Arrow files, by the library pyarrow, which nothing else here needs.

1. No more than BATCH_ROWS rows are objects at a time; what pyarrow holds beside them is a row group, or what
   is mapped.
2. A column of objects gives each of its rows all keys that any row has: a null in one is a key that the row
   does not have, however deep it stands. In a list a null stays.
3. A column of moments is read as numbers: no row means them, and not every one is a moment of Python's (one
   of nanoseconds is not, nor is the year 10000).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from quartet.cli.extras import need
from quartet.config import ConfigError

#: How such files begin; the last as the library datasets saves them.
PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
NAMES: Final = {PARQUET: "Parquet", ARROW: "Arrow", ARROW_STREAM: "Arrow"}
#: Rows of chats are some kilobytes each.
BATCH_ROWS = 256


def kind_of(beginning: bytes) -> bytes | None:
    """Which of them a file is that begins so."""
    return next((kind for kind in NAMES if beginning.startswith(kind)), None)


def rows_of_columns(file: Path, kind: bytes, what: str) -> Iterator[dict[str, Any]]:
    """The rows. Raises ConfigError, which begins with what names the file."""
    try:
        need("pyarrow", extra="data")
    except ConfigError as error:
        raise ConfigError(f"{what} is {NAMES[kind]}, for which {error}; or write JSON lines") from error
    from pyarrow import ArrowException

    try:
        for batch in _batches(file, kind):
            for first in range(0, batch.num_rows, BATCH_ROWS):
                for row in _timeless(batch.slice(first, BATCH_ROWS)).to_pylist():
                    yield without_nulls(row)
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{what} is {NAMES[kind]} that cannot be read: {reason}") from error


def _batches(file: Path, kind: bytes) -> Iterator[Any]:
    """What pyarrow reads at a time."""
    import pyarrow
    from pyarrow import parquet

    if kind == PARQUET:
        with parquet.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=BATCH_ROWS)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        if kind == ARROW_STREAM:
            yield from pyarrow.ipc.open_stream(mapped)
            return
        parts = pyarrow.ipc.open_file(mapped)
        for number in range(parts.num_record_batches):
            yield parts.get_batch(number)


def _timeless(batch: Any) -> Any:
    """The same rows (3)."""
    import pyarrow

    numbers = {32: pyarrow.int32(), 64: pyarrow.int64()}
    for at, field in enumerate(batch.schema):
        if pyarrow.types.is_temporal(field.type) and field.type.bit_width in numbers:
            number = numbers[field.type.bit_width]
            batch = batch.set_column(at, field.name, batch.column(at).cast(number))
    return batch


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null, however deep they stand."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
