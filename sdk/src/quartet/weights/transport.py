"""Faster roads than Fetch for the bytes of a payload: shared memory, or a fabric's own (NCCL, RDMA).

gRPC stays the control plane: versions, manifests and digests come over it, and so do the bytes wherever no
other road is open. A road brings bytes and decides nothing: what it brings is verified like anything else.
"""

from __future__ import annotations

from typing import Protocol

from quartet.v1 import weights_pb2 as pb


class Transport(Protocol):
    """One road, as a reader sees it."""

    def ask(self, request: pb.GetManifestRequest) -> None:
        """Say in the request what the publisher must know to open it."""

    async def payload(self, answer: pb.GetManifestResponse) -> memoryview | None:
        """Bring the whole payload of the answer's manifest; None where the road is not open."""
