"""The mark that makes a folder a complete state: COMPLETE.json, written last.

1. It says what the state is, and the size and digest of each of its files.
2. It has a digest of its own, over all that it says: a harmed one is as good as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

MARK = "COMPLETE.json"
#: Of a folder that is no state, or of a file in its place. Any other error is the disk's.
_ABSENT = (FileNotFoundError, NotADirectoryError)


def write_mark(folder: Path, body: Mapping[str, Any]) -> None:
    """Say that the folder is complete. Errors: OSError."""
    mark = {"digest": _digest_of(body), **body}
    (folder / MARK).write_text(json.dumps(mark, indent=1), encoding="utf-8")


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What the mark says; None where it is harmed or there is none. Errors: OSError, of the disk."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        digest = mark.pop("digest")
    except (*_ABSENT, ValueError, KeyError, AttributeError, TypeError):
        return None
    return mark if digest == _digest_of(mark) else None


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
