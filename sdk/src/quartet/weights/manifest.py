"""Manifests: the identity of a version, and the digests by which a reader knows that it has it.

1. Equal `digest`s mean equal weights: it covers every name, dtype, shape and tensor digest, and neither run
   nor version number.
2. Equal `layout_signature`s mean that one version can be copied over the other in place.
3. `check_manifest` accepts only manifests that are consistent in themselves, so a damaged one never judges a
   payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import xxhash

from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights.layout import MAX_HEADER_BYTES, PREFIX_BYTES, header_of
from quartet.weights.tensor import Tensor, tensor_bytes


def tensor_digest(data: memoryview | bytes) -> int:
    """TensorInfo.digest: xxh3_64 of the little-endian bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


def build_manifest(run_id: str, version: int, tensors: Mapping[str, Tensor]) -> pb.WeightManifest:
    """Describe a version and its full payload. Hashes every byte: not for the event loop."""
    infos = [
        pb.TensorInfo(
            name=name,
            dtype=tensors[name].dtype,
            shape=tensors[name].shape,
            digest=tensor_digest(tensors[name].data),
            encoding=pb.TENSOR_ENCODING_DENSE,
        )
        for name in sorted(tensors)
    ]
    _, _, size = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    return pb.WeightManifest(
        run_id=run_id,
        version=version,
        tensors=infos,
        digest=weights_digest(infos),
        layout_signature=layout_signature(infos),
        payload_bytes=size,
    )


def _layout_bytes(info: pb.TensorInfo) -> bytes:
    shape = ",".join(str(extent) for extent in info.shape)
    return b"\0".join((info.name.encode(), info.dtype.encode(), shape.encode(), b""))


def weights_digest(infos: Iterable[pb.TensorInfo]) -> bytes:
    """WeightManifest.digest. Shapes are decimals joined by commas, tensor digests 8 bytes big-endian."""
    state = xxhash.xxh3_128()
    for info in infos:
        state.update(_layout_bytes(info) + info.digest.to_bytes(8, "big"))
    return bytes(state.digest())


def layout_signature(infos: Iterable[pb.TensorInfo]) -> str:
    """WeightManifest.layout_signature."""
    state = xxhash.xxh3_128()
    for info in infos:
        state.update(_layout_bytes(info))
    return str(state.hexdigest())


def check_manifest(manifest: pb.WeightManifest) -> None:
    """Refuse a manifest that contradicts itself, with CHECKSUM_MISMATCH."""
    names = [info.name for info in manifest.tensors]
    if any(a >= b for a, b in pairwise(names)):
        raise mismatch("order of tensors in the manifest")
    if manifest.digest != weights_digest(manifest.tensors):
        raise mismatch("manifest digest")
    if manifest.layout_signature != layout_signature(manifest.tensors):
        raise mismatch("layout signature")
    try:
        size = sum(tensor_bytes(info.dtype, tuple(info.shape)) for info in manifest.tensors)
    except ValueError as error:
        raise mismatch(f"manifest: {error}") from error
    # A full payload is its tensors and one header; anything else would make a reader allocate for nothing.
    if not manifest.HasField("base_version") and not (
        size <= manifest.payload_bytes <= size + PREFIX_BYTES + MAX_HEADER_BYTES
    ):
        raise mismatch("payload size in the manifest")


def verify_tensor(info: pb.TensorInfo, data: memoryview | bytes) -> None:
    """Refuse a tensor whose bytes are not those of the manifest, with CHECKSUM_MISMATCH."""
    if len(data) != tensor_bytes(info.dtype, tuple(info.shape)) or tensor_digest(data) != info.digest:
        raise mismatch(f"tensor {info.name}")


def mismatch(what: str) -> QuartetError:
    """CHECKSUM_MISMATCH of a named thing."""
    return QuartetError(
        "CHECKSUM_MISMATCH", f"{what} is not what its publisher declared; fetch it again", what=what
    )
