"""The inference replicas as the orchestrator reaches them: it asks what they serve, and never samples
itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import ClientSecurity, connect
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

from quartet_orchestrator.outage import AWAY

ASK_S = 5.0


class Policies:
    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        self._channels = [connect(address, security=security) for address in addresses]
        self._stubs = [InferenceServiceStub(one) for one in self._channels]  # type: ignore[no-untyped-call]

    async def serving(self, run_id: str, version: int) -> None:
        """Returns where a replica serves the run at the version or a later one (or none is known); else
        NOT_READY."""
        if not self._stubs:
            return
        seen = await asyncio.gather(*(self._ask(stub) for stub in self._stubs))
        if not any(
            model is not None and model.run_id == run_id and model.policy_version >= version for model in seen
        ):
            raise QuartetError(
                "NOT_READY", f"no inference replica serves run {run_id!r} at version {version} yet"
            )

    async def _ask(self, stub: InferenceServiceStub) -> ipb.GetModelResponse | None:
        try:
            model: ipb.GetModelResponse = await unary(stub.GetModel, ipb.GetModelRequest(), timeout_s=ASK_S)
        except QuartetError as error:
            if error.reason not in AWAY:
                raise
            return None
        return model if model.HasField("policy_version") else None

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
