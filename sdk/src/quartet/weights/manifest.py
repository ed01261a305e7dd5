"""Manifests: the identity of a version, and the digests by which a reader knows that it has it.

1. Equal `digest`s mean equal weights: it covers every name, dtype, shape and tensor digest, and an adapter's
   configuration, and neither run nor version number.
2. Equal `layout_signature`s mean that one version can be copied over the other in place.
3. `check_manifest` accepts only manifests that are consistent in themselves and have their checksum, so a
   damaged one never judges a payload, and is never taken for another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import xxhash

from quartet.errors import QuartetError
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.v1 import weights_pb2 as pb
from quartet.weights.cores import each
from quartet.weights.layout import MAX_HEADER_BYTES, METADATA_NAME, PREFIX_BYTES, header_of
from quartet.weights.tensor import Tensor, tensor_bytes

#: A manifest goes in one message, with a little beside it: some 50,000 tensors.
MAX_MANIFEST_BYTES = MAX_MESSAGE_BYTES - 64 * 1024


def tensor_digest(data: memoryview | bytes) -> int:
    """TensorInfo.digest: xxh3_64 of the little-endian bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


def build_manifest(
    run_id: str,
    version: int,
    tensors: Mapping[str, Tensor],
    *,
    canary: pb.Canary | None = None,
    adapter_config: str = "",
) -> pb.WeightManifest:
    """Describe a version and its full payload. Hashes every byte: not for the event loop."""

    def described(name: str) -> pb.TensorInfo:
        return pb.TensorInfo(
            name=name,
            dtype=tensors[name].dtype,
            shape=tensors[name].shape,
            digest=tensor_digest(tensors[name].data),
            encoding=pb.TENSOR_ENCODING_DENSE,
        )

    infos = each(described, sorted(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    _, _, size = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    manifest = pb.WeightManifest(
        run_id=run_id,
        version=version,
        tensors=infos,
        digest=weights_digest(infos, adapter_config),
        layout_signature=layout_signature(infos),
        payload_bytes=size,
        canary=canary,
        adapter_config=adapter_config,
    )
    sealed(manifest)
    if manifest.ByteSize() > MAX_MANIFEST_BYTES:
        raise QuartetError(
            "INVALID_REQUEST",
            f"the manifest of {len(infos)} tensors has {manifest.ByteSize()} bytes, and a message has room "
            f"for {MAX_MANIFEST_BYTES}; publish fewer tensors, such as the experts of a layer as one",
            field="tensors",
            value=len(infos),
        )
    return manifest


def sealed(manifest: pb.WeightManifest) -> pb.WeightManifest:
    """The manifest, its checksum set: the last thing that is done to one."""
    manifest.checksum = _checksum(manifest)
    return manifest


def _checksum(manifest: pb.WeightManifest) -> int:
    base = str(manifest.base_version) if manifest.HasField("base_version") else ""
    words = (manifest.run_id, str(manifest.version), base, str(manifest.payload_bytes), "")
    state = xxhash.xxh3_64("\0".join(words).encode())
    state.update(manifest.digest + manifest.base_digest)
    # An enum may hold any number; no encoding that is known is beyond a byte.
    state.update(bytes(info.encoding & 0xFF for info in manifest.tensors))
    state.update(np.array(manifest.canary.token_ids, "<u4").tobytes())
    state.update(np.array(manifest.canary.logprobs, "<f4").tobytes())
    return int(state.intdigest())


def of_full_payload(manifest: pb.WeightManifest) -> pb.WeightManifest:
    """The manifest that the same version has for a reader without a base."""
    full = pb.WeightManifest()
    full.CopyFrom(manifest)
    full.ClearField("base_version")
    full.ClearField("base_digest")
    for info in full.tensors:
        info.encoding = pb.TENSOR_ENCODING_DENSE
    specs = {info.name: (info.dtype, tuple(info.shape)) for info in full.tensors}
    _, _, full.payload_bytes = header_of(specs)
    return sealed(full)


def _layout_bytes(info: pb.TensorInfo) -> bytes:
    shape = ",".join(str(extent) for extent in info.shape)
    return b"\0".join((info.name.encode(), info.dtype.encode(), shape.encode(), b""))


def weights_digest(infos: Iterable[pb.TensorInfo], adapter_config: str = "") -> bytes:
    """WeightManifest.digest. Shapes are decimals joined by commas, tensor digests 8 bytes big-endian."""
    state = xxhash.xxh3_128()
    for info in infos:
        state.update(_layout_bytes(info) + info.digest.to_bytes(8, "big"))
    state.update(adapter_config.encode())
    return bytes(state.digest())


def layout_signature(infos: Iterable[pb.TensorInfo]) -> str:
    """WeightManifest.layout_signature."""
    state = xxhash.xxh3_128()
    for info in infos:
        state.update(_layout_bytes(info))
    return str(state.hexdigest())


def check_manifest(manifest: pb.WeightManifest) -> None:
    """Refuse a manifest that contradicts itself, with CHECKSUM_MISMATCH."""
    checksum = _checksum(manifest)
    if manifest.checksum != checksum:
        raise mismatch("checksum of the manifest", f"{manifest.checksum:016x}", f"{checksum:016x}")
    names = [info.name for info in manifest.tensors]
    if any(a >= b for a, b in pairwise(names)):
        raise mismatch("order of tensors in the manifest")
    if METADATA_NAME in names:
        raise mismatch(f"tensor named {METADATA_NAME} in the manifest")
    digest = weights_digest(manifest.tensors, manifest.adapter_config)
    if manifest.digest != digest:
        raise mismatch("digest of the manifest", manifest.digest.hex(), digest.hex())
    signature = layout_signature(manifest.tensors)
    if manifest.layout_signature != signature:
        raise mismatch("layout signature of the manifest", manifest.layout_signature, signature)
    try:
        size = sum(tensor_bytes(info.dtype, tuple(info.shape)) for info in manifest.tensors)
    except ValueError as error:
        raise mismatch(f"manifest: {error}") from error
    # A full payload is its tensors and one header, a delta never more; a reader allocates no more than that.
    least = 0 if manifest.HasField("base_version") else size
    most = size + PREFIX_BYTES + MAX_HEADER_BYTES
    if not least <= manifest.payload_bytes <= most:
        raise mismatch("payload size in the manifest", manifest.payload_bytes, f"from {least} to {most}")
    if not manifest.HasField("base_version") and any(
        info.encoding != pb.TENSOR_ENCODING_DENSE for info in manifest.tensors
    ):
        raise mismatch("encoding in the manifest of a full payload")


def verify_tensor(info: pb.TensorInfo, data: memoryview | bytes) -> None:
    """Refuse a tensor whose bytes are not those of the manifest, with CHECKSUM_MISMATCH."""
    size = tensor_bytes(info.dtype, tuple(info.shape))
    if len(data) != size:
        raise mismatch(f"tensor {info.name}", f"{info.dtype} {list(info.shape)}: {size}", len(data))
    digest = tensor_digest(data)
    if digest != info.digest:
        raise mismatch(f"tensor {info.name}", f"{info.digest:016x}", f"{digest:016x}")


def mismatch(what: str, declared: object = None, found: object = None) -> QuartetError:
    """CHECKSUM_MISMATCH of a named thing; with what was declared and what the contents give, where known."""
    differ = "" if declared is None else f" (declared: {declared or 'nothing'}, by the contents: {found})"
    return QuartetError(
        "CHECKSUM_MISMATCH",
        f"{what} is not what its publisher declared{differ}; fetch it again, or push it again",
        what=what,
    )
