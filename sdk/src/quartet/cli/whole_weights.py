"""Whether the weights in a model's folder are all there, and whole: what a download that was broken off has
left is told before anything starts, and not by services that have loaded every part before it.

1. Looked at are the files that transformers loads, and of these the headers. What else is wrong with them the
   service says that loads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quartet.weights.layout import read_header

WHOLE: Final = "model.safetensors"
#: Names the parts of one that is not in one file.
INDEX: Final = "model.safetensors.index.json"
#: What stands for a large file in a repository that was cloned without Git LFS.
POINTER: Final = b"version https://git-lfs"


def lacking(folder: Path) -> str:
    """What is not there, with what to do; empty where nothing is lacking."""
    files = _loaded(folder)
    if gone := [file.name for file in files if not file.is_file()]:
        return f"has {len(files) - len(gone)} of {len(files)} parts, and no {gone[0]}; fetch it again"
    for file in files:
        with file.open("rb") as opened:
            beginning = opened.read(len(POINTER))
        if beginning == POINTER:
            return f"has a pointer of Git LFS in the place of {file.name}; write 'git lfs pull' in its folder"
        there, whole = file.stat().st_size, _whole_bytes(file)
        if there < whole:
            return f"has {there} bytes of {file.name}, which are {whole} at least; fetch it again"
    return ""


def _loaded(folder: Path) -> Sequence[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    try:
        parts = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / part for part in sorted(set(parts))]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []


def _whole_bytes(file: Path) -> int:
    """How large the file is by its header, at least where that is not whole; 0 where it does not say."""
    try:
        begin, tensors = read_header(file)
        return begin + int(max((one["data_offsets"][1] for one in tensors.values()), default=0))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return 0
