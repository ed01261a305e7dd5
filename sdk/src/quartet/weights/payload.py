"""Payloads: the bytes that lead to a version, as a list of views, never as one copy.

1. Equal tensors give equal payload bytes, so a fetch can resume at any offset of any server that holds
   the version.
2. Chunks end at multiples of CHUNK_BYTES, wherever a fetch begins.
3. A payload that nobody fetches is never hashed: deltas and shared memory need no digest of it.
4. `decode_payload` returns views of the buffer, and only when every name, shape, dtype and digest of the
   manifest was found in it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import xxhash

from quartet.v1 import weights_pb2 as pb
from quartet.weights.cores import each
from quartet.weights.frames import FETCH_CHUNK, encode_chunk
from quartet.weights.layout import Extent, header_of, parse_header
from quartet.weights.manifest import mismatch, verify_tensor
from quartet.weights.passing import Place
from quartet.weights.tensor import Tensor

#: The flat optimum of the transport: smaller chunks cost CPU per message, larger ones leave the cache.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Digests:
    """Of one payload: of all its bytes, and of its chunks by their spans."""

    whole: bytes
    chunks: Mapping[tuple[int, int], int]


class Payload:
    """One payload: its parts in order, where each begins, its size; its digests for who asks for them."""

    def __init__(self, parts: Iterable[memoryview | bytes]) -> None:
        """Of these parts, without a copy."""
        # Read-only, so that no reader of the payload can change the publisher's weights.
        self.parts = tuple(memoryview(part).toreadonly() for part in parts if part)
        *begins, self.size = accumulate((len(part) for part in self.parts), initial=0)
        self.begins = tuple(begins)
        self._digests: Digests | None = None
        # Who asks while they are taken waits for them.
        self._taking = threading.Lock()

    def digests(self) -> Digests:
        """Hashes every byte the first time: not for the event loop."""
        with self._taking:
            if self._digests is None:
                self._digests = self._hashed()
            return self._digests

    def _hashed(self) -> Digests:
        state, checksums = xxhash.xxh3_128(), {}
        for begin, end in chunk_spans(self.size, 0):  # chunk by chunk: the second hash finds it in the cache
            chunk = self.slices(begin, end)
            checksums[begin, end] = _checksum(chunk)
            for view in chunk:
                state.update(view)
        return Digests(bytes(state.digest()), checksums)

    def slices(self, begin: int, end: int) -> list[memoryview]:
        """The bytes begin..end as views of the parts."""
        views = []
        index = max(0, bisect_right(self.begins, begin) - 1)
        while begin < end:
            at = begin - self.begins[index]
            view = self.parts[index][at : at + end - begin]
            if view:
                views.append(view)
            begin += len(view)
            index += 1
        return views

    def encoded_chunks(self, offset: int, tag: int = FETCH_CHUNK) -> Iterator[bytes]:
        """Serialized messages with the chunks from `offset` on; each byte is copied once. As `digests`."""
        checksums = self.digests().chunks
        for begin, end in chunk_spans(self.size, offset):
            views = self.slices(begin, end)
            # Only a chunk that begins off the grid is not known.
            checksum = checksums.get((begin, end))
            if checksum is None:
                checksum = _checksum(views)
            yield encode_chunk(begin, views, end - begin, checksum, tag)

    def end(self) -> pb.WeightEnd:
        """The frame that closes it. As `digests`."""
        return pb.WeightEnd(payload_bytes=self.size, payload_digest=self.digests().whole)


def _checksum(views: Iterable[memoryview]) -> int:
    """WeightChunk.checksum of the bytes in these views."""
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return int(state.intdigest())


def full_payload(tensors: Mapping[str, Tensor]) -> Payload:
    """The safetensors file of these tensors, without a copy."""
    header, order, _ = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    return Payload([header, *(tensors[name].data for name in order)])


def chunk_spans(size: int, offset: int) -> Iterator[tuple[int, int]]:
    """The spans begin..end of the chunks from `offset` on."""
    while offset < size:
        end = min(size, (offset // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield offset, end
        offset = end


def chunks(payload: Payload, offset: int = 0) -> Iterator[pb.WeightChunk]:
    """The chunks from `offset` on, made one by one."""
    for begin, end in chunk_spans(payload.size, offset):
        data = b"".join(payload.slices(begin, end))
        yield pb.WeightChunk(offset=begin, data=data, checksum=xxhash.xxh3_64_intdigest(data))


def open_payload(buffer: memoryview, manifest: pb.WeightManifest) -> dict[str, Extent]:
    """Where each tensor lies in a payload of the manifest's size; CHECKSUM_MISMATCH where it is damaged."""
    if len(buffer) != manifest.payload_bytes:
        raise mismatch("payload size")
    try:
        return parse_header(buffer)
    except (ValueError, RecursionError) as error:
        raise mismatch(f"payload header ({error})") from error


def decode_payload(
    buffer: memoryview | bytes | bytearray,
    manifest: pb.WeightManifest,
    passed: Mapping[Place, int] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Find and verify every tensor of the manifest in a full payload; CHECKSUM_MISMATCH otherwise.

    `passed` are digests that were taken already.
    """
    view = memoryview(buffer).cast("B")
    extents = open_payload(view, manifest)
    if extents.keys() != {info.name for info in manifest.tensors}:
        raise mismatch("set of tensor names")

    def verified(info: pb.TensorInfo) -> Tensor:
        extent = extents[info.name]
        if (extent.dtype, extent.shape) != (info.dtype, tuple(info.shape)):
            raise mismatch(f"dtype or shape of tensor {info.name}")
        data = view[extent.begin : extent.end]
        if passed.get((extent.begin, extent.end)) != info.digest:
            verify_tensor(info, data)
        return Tensor(info.dtype, tuple(info.shape), data)

    # What passed was hashed on its way, all but what came out of its order.
    tensors = each(verified, manifest.tensors, 0 if passed else len(view))
    return {info.name: tensor for info, tensor in zip(manifest.tensors, tensors, strict=True)}
