"""The inference replicas as the orchestrator reaches them: it asks what they serve, and never samples
itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import ClientSecurity, connect
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

from quartet_orchestrator.outage import AWAY

ASK_S = 5.0
#: An adapter is fetched meanwhile.
LOAD_S = 60.0

log = structlog.get_logger()


class Policies:
    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        self._channels = [connect(address, security=security) for address in addresses]
        self._stubs = [InferenceServiceStub(one) for one in self._channels]  # type: ignore[no-untyped-call]

    async def serving(self, run_id: str, version: int, *, adapter: bool = False) -> None:
        """Returns where a replica serves the run at the version or a later one (or none is known); else
        NOT_READY. A run whose versions are an adapter's is loaded by every replica that does not serve it."""
        if not self._stubs:
            return
        seen = await asyncio.gather(*(self._version(stub, run_id, adapter) for stub in self._stubs))
        if not any(held is not None and held >= version for held in seen):
            raise QuartetError(
                "NOT_READY", f"no inference replica serves run {run_id!r} at version {version} yet"
            )

    async def _version(self, stub: InferenceServiceStub, run_id: str, adapter: bool) -> int | None:
        """The version of the run that a replica serves."""
        model = await self._ask(stub)
        if model is None:
            return None
        if model.run_id == run_id:
            return int(model.policy_version) if model.HasField("policy_version") else None
        held = next((one.policy_version for one in model.adapters if one.run_id == run_id), None)
        if held is not None or not adapter:
            return held
        try:
            request = ipb.LoadAdapterRequest(run_id=run_id)
            loaded: ipb.LoadAdapterResponse = await unary(stub.LoadAdapter, request, timeout_s=LOAD_S)
        except QuartetError as error:
            log.info("adapter not loaded", run_id=run_id, why=str(error))
            return None
        return int(loaded.version)

    async def _ask(self, stub: InferenceServiceStub) -> ipb.GetModelResponse | None:
        try:
            model: ipb.GetModelResponse = await unary(stub.GetModel, ipb.GetModelRequest(), timeout_s=ASK_S)
        except QuartetError as error:
            if error.reason not in AWAY:
                raise
            return None
        return model

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
