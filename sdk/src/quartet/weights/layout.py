"""Where each tensor lies in a payload: one safetensors file, laid out by rule.

Equal manifests give equal headers.

1. Tensors lie by element size, largest first, then by name (as the safetensors library writes them): every
   one starts aligned to its elements, because the header is padded to HEADER_ALIGNMENT.
2. A parsed header is accepted only if its tensors cover the data exactly: no holes, no overlap, no rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.weights.tensor import DTYPE_BYTES, tensor_bytes

#: Length prefix of a safetensors file.
PREFIX_BYTES = 8
#: Padding of the header: the largest element size there is.
HEADER_ALIGNMENT = 8
#: The safetensors library's own bound; a longer header is damage, not a model.
MAX_HEADER_BYTES = 100_000_000
#: Loaders of Hugging Face folders want to be told which framework wrote the file.
METADATA = {"format": "pt"}
#: Where a header has them, and no tensor.
METADATA_NAME = "__metadata__"


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor's place; begin and end count from the start of the payload."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_of(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str], int]:
    """The prefix and header, the order in which the tensors follow, and the size of the whole payload."""
    if METADATA_NAME in specs:
        raise ValueError(f"no tensor can be named {METADATA_NAME}: safetensors uses that name itself")
    order = order_of(specs)
    entries: dict[str, object] = {METADATA_NAME: METADATA}
    at = 0
    for name in order:
        dtype, shape = specs[name]
        size = tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, order, PREFIX_BYTES + len(text) + at


def order_of(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """The order in which tensors follow each other."""
    return sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name][0]], name))


def parse_header(payload: memoryview) -> dict[str, Extent]:
    """Read the header of a safetensors payload; ValueError says what is wrong with it."""
    if len(payload) < PREFIX_BYTES:
        raise ValueError("the payload is shorter than a safetensors prefix")
    length = int.from_bytes(payload[:PREFIX_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, len(payload) - PREFIX_BYTES):
        raise ValueError(f"a header of {length} bytes does not fit")
    entries = json.loads(bytes(payload[PREFIX_BYTES : PREFIX_BYTES + length]))
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    entries.pop(METADATA_NAME, None)
    start = PREFIX_BYTES + length
    extents = {name: _parse_extent(name, entry, start) for name, entry in entries.items()}
    at = start
    for extent in sorted(extents.values(), key=lambda extent: (extent.begin, extent.end)):
        if extent.begin != at:
            raise ValueError(f"the data has a hole or an overlap at byte {min(at, extent.begin)}")
        at = extent.end
    if at != len(payload):
        raise ValueError(f"the tensors end at byte {at} of {len(payload)}")
    return extents


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Of a safetensors file as anybody writes it: the byte at which its tensors begin, and what is said of
    each, which is nothing where the file ends before. Errors: OSError, ValueError."""
    with file.open("rb") as opened:
        prefix = opened.read(PREFIX_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < PREFIX_BYTES or length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes does not fit")
        text = opened.read(length)
    entries = json.loads(text) if len(text) == length else {}
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    entries.pop(METADATA_NAME, None)
    return PREFIX_BYTES + length, entries


def _parse_extent(name: str, entry: object, start: int) -> Extent:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(extent) is int for extent in shape
        ):
            size = tensor_bytes(dtype, tuple(shape))
            if begin < 0 or end - begin != size:
                raise ValueError(f"tensor {name} spans {begin}..{end}, but has {size} bytes")
            return Extent(dtype, tuple(shape), start + begin, start + end)
    raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets")
