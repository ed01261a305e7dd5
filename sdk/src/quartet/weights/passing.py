"""Digests of a full payload's tensors, taken as its bytes pass: once more while they are in the cache.

1. `found` says of places in the payload what the bytes there hash to, whatever tensor they are. A place whose
   bytes have not all passed, in order, is not in it: whoever needs its digest hashes it where it lies.
2. The places are those that the layout's rule gives to the manifest's tensors.
"""

from __future__ import annotations

import xxhash

from quartet.v1 import weights_pb2 as pb
from quartet.weights.layout import order_of
from quartet.weights.tensor import tensor_bytes

#: Begin and end of a tensor, counted from the start of the payload.
Place = tuple[int, int]


class PassingDigests:
    """Digests by place."""

    def __init__(self, manifest: pb.WeightManifest) -> None:
        """Of the payload of this manifest, which was checked."""
        specs = {info.name: (info.dtype, tuple(info.shape)) for info in manifest.tensors}
        sizes = [tensor_bytes(*specs[name]) for name in order_of(specs)]
        at = manifest.payload_bytes - sum(sizes)
        self._places: list[Place] = []
        for size in filter(None, sizes):
            self._places.append((at, at + size))
            at += size
        self._state = xxhash.xxh3_64()
        #: TensorInfo.digest of what lies there.
        self.found: dict[Place, int] = {}

    def update(self, position: int, data: memoryview) -> None:
        """These bytes follow those of the last call; the first begin at 0."""
        end = position + len(data)
        while len(self.found) < len(self._places):
            begin, until = place = self._places[len(self.found)]
            if begin >= end:
                return
            self._state.update(data[max(begin - position, 0) : until - position])
            if until > end:
                return
            self.found[place] = self._state.intdigest()
            self._state.reset()
