"""Deltas: the payload that leads from one version to another, and back into whole tensors.

1. A delta's manifest names every tensor of the version with its digest, as a full one does; what differs is
   base_version, base_digest, the encodings and the size. Its payload is a safetensors file: blobs as U8.
2. `apply_delta` returns tensors only when every one of them has the digest of the manifest; it changes
   neither base nor payload.
3. Tensors that did not change are not copied, unless they are small: a small one would keep the whole buffer
   of an old version alive.
4. Memory beside the result is bounded by one segment of `threads()` tensors (quartet.weights.sparse).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from quartet.v1 import weights_pb2 as pb
from quartet.weights import pages
from quartet.weights.cores import threads
from quartet.weights.encodings import Encoded, decode_tensor, encode_tensor
from quartet.weights.layout import Extent, header_of
from quartet.weights.manifest import mismatch, sealed, verify_tensor
from quartet.weights.payload import Payload, open_payload
from quartet.weights.tensor import Tensor

#: Unchanged tensors below this size are copied.
COPIED_BELOW_BYTES = 1 << 20


class Held(Protocol):
    """A version whose tensors somebody holds, verified: what a delta leads from or to."""

    @property
    def manifest(self) -> pb.WeightManifest:
        """Of its full payload."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor of the manifest."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A payload relative to a base, and its manifest."""

    manifest: pb.WeightManifest
    payload: Payload

    @property
    def base(self) -> tuple[int, bytes]:
        """Number and digest of the version it can be applied to."""
        return int(self.manifest.base_version), bytes(self.manifest.base_digest)


def make_delta(base: Held, new: Held) -> Delta:
    """Encode every tensor against its base. Takes seconds for a large model: not for the event loop."""
    manifest = pb.WeightManifest()
    manifest.CopyFrom(new.manifest)
    manifest.base_version = base.manifest.version
    manifest.base_digest = base.manifest.digest
    known = {info.name: info for info in base.manifest.tensors}

    def encoded(info: pb.TensorInfo) -> Encoded:
        before = known.get(info.name)
        if before and (before.digest, before.dtype, before.shape) == (info.digest, info.dtype, info.shape):
            return Encoded(pb.TENSOR_ENCODING_UNCHANGED, [])
        return encode_tensor(base.tensors.get(info.name), new.tensors[info.name])

    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts = {}
    with ThreadPoolExecutor(threads()) as pool:
        for info, one in zip(manifest.tensors, pool.map(encoded, manifest.tensors), strict=True):
            info.encoding = one.encoding
            if one.encoding == pb.TENSOR_ENCODING_DENSE:
                specs[info.name] = (info.dtype, tuple(info.shape))
            elif one.encoding != pb.TENSOR_ENCODING_UNCHANGED:
                specs[info.name] = ("U8", (one.size,))
            parts[info.name] = one.parts
    header, order, manifest.payload_bytes = header_of(specs)
    return Delta(sealed(manifest), Payload([header, *(part for name in order for part in parts[name])]))


def apply_delta(buffer: memoryview, manifest: pb.WeightManifest, base: Held) -> dict[str, Tensor]:
    """Decode and verify every tensor; CHECKSUM_MISMATCH otherwise. Not for the event loop."""
    held = base.manifest
    if (manifest.base_version, manifest.base_digest) != (held.version, held.digest):
        raise mismatch(f"base version {manifest.base_version} of the delta")
    extents = open_payload(buffer, manifest)
    carried = {info.name for info in manifest.tensors if info.encoding != pb.TENSOR_ENCODING_UNCHANGED}
    if extents.keys() != carried:
        raise mismatch("set of tensor names")
    names = [info.name for info in manifest.tensors]

    def verified(info: pb.TensorInfo) -> Tensor:
        tensor = _decoded(info, extents.get(info.name), buffer, base.tensors.get(info.name))
        verify_tensor(info, tensor.data)
        return tensor

    with ThreadPoolExecutor(threads()) as pool:
        return dict(zip(names, pool.map(verified, manifest.tensors), strict=True))


def _decoded(info: pb.TensorInfo, extent: Extent | None, buffer: memoryview, base: Tensor | None) -> Tensor:
    dtype, shape = info.dtype, tuple(info.shape)
    stored = memoryview(b"") if extent is None else buffer[extent.begin : extent.end]
    if info.encoding == pb.TENSOR_ENCODING_DENSE:
        if extent is None or (extent.dtype, extent.shape) != (dtype, shape):
            raise mismatch(f"dtype or shape of tensor {info.name}")
        # A copy: a view would keep the delta alive for as long as the version.
        return Tensor(dtype, shape, _copied(stored))
    if base is None or (base.dtype, base.shape) != (dtype, shape):
        raise mismatch(f"base of tensor {info.name}")
    if info.encoding == pb.TENSOR_ENCODING_UNCHANGED:
        return base if base.nbytes >= COPIED_BELOW_BYTES else Tensor(dtype, shape, _copied(base.data))
    out = pages.take(base.nbytes)
    try:
        decode_tensor(info.encoding, stored, base, out)
    except ValueError as error:
        raise mismatch(f"encoding of tensor {info.name} ({error})") from error
    return Tensor(dtype, shape, out)


def _copied(data: memoryview | bytes) -> memoryview:
    out = pages.take(len(data))
    out[:] = data
    return out
