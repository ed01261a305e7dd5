"""What a fetch returns: a whole, verified version."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.v1 import weights_pb2 as pb
from quartet.weights.delta import Delta
from quartet.weights.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified version, whichever way it came."""

    #: As the publisher's own for the full payload: equal for every road.
    manifest: pb.WeightManifest
    #: Views of the memory that the payload arrived in, of the base (what did not change), or of their own.
    tensors: dict[str, Tensor]
    #: The deltas that led here, in order, so that a relay can hand them on; none after a full payload.
    deltas: tuple[Delta, ...] = ()
    #: Bytes of all payloads that were received for it.
    received_bytes: int = 0
