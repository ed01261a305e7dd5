"""Adapters that replicas load for the orchestrator, for longer than it waits for each attempt.

A replica goes on with a load that its caller has left, and ends it where the adapter is unloaded. Whoever
unloads what an earlier run left therefore does so once: before each attempt it would have the load begin
anew, and one that takes longer than LOAD_S would never end.
"""

from __future__ import annotations

from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

from quartet_orchestrator.peers import Peer

#: An adapter is fetched meanwhile, and its canary is scored.
LOAD_S = 60.0
#: Loads that are remembered; past it each begins once more, which costs time alone.
MAX_GOING_ON = 1024


class AdapterLoads:
    """Those that go on, none at first."""

    def __init__(self) -> None:
        """None goes on."""
        self._going_on: set[tuple[str, str]] = set()

    def __contains__(self, load: tuple[str, str]) -> bool:
        """Whether that of a replica's address and a run goes on."""
        return load in self._going_on

    def forget(self, run_id: str) -> None:
        """Another run is to have that name."""
        self._going_on = {load for load in self._going_on if load[1] != run_id}

    async def load(
        self, peer: Peer[InferenceServiceStub], run_id: str, *, after_unload: bool
    ) -> ipb.LoadAdapterResponse:
        """LoadAdapter; what goes on past LOAD_S is remembered where an unload went before it. Raises
        QuartetError."""
        load, request = (peer.address, run_id), ipb.LoadAdapterRequest(run_id=run_id)
        try:
            loaded: ipb.LoadAdapterResponse = await unary(peer.stub.LoadAdapter, request, timeout_s=LOAD_S)
        except QuartetError as error:
            # gRPC's own: our time is over. Where the replica says so itself, the load has ended there.
            if error.reason != "DEADLINE" or "grpc_code" not in error.metadata:
                self._going_on.discard(load)
            elif after_unload:
                if len(self._going_on) >= MAX_GOING_ON:
                    self._going_on.clear()
                self._going_on.add(load)
            raise
        self._going_on.discard(load)
        return loaded
