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
#: An adapter is fetched meanwhile.
LOAD_S = 60.0


class Policies:
    """Connections to the inference replicas, of which there may be none."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        self._addresses = list(addresses)
        self._channels = [connect(address, security=security) for address in addresses]
        self._stubs = [InferenceServiceStub(one) for one in self._channels]  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._stubs)

    async def serving(self, run_id: str, version: int, *, adapter: bool = False) -> None:
        """Returns where a replica serves the run at the version or a later one (or none is known); else
        NOT_READY. A run whose versions are an adapter's is loaded by every replica that does not serve it.
        Where no replica will serve it as it is, each having failed or refused, that is raised: no waiting
        mends it."""
        if not self._stubs:
            return
        seen = await asyncio.gather(*(self._held(stub, run_id, adapter) for stub in self._stubs))
        if any(isinstance(held, int) and held >= version for held in seen):
            return
        found = "; ".join(
            f"{address}: {f'version {held}' if isinstance(held, int) else held.message}"
            for address, held in zip(self._addresses, seen, strict=True)
        )
        if all(isinstance(held, QuartetError) and held.reason not in AWAY for held in seen):
            reasons = {held.reason for held in seen if isinstance(held, QuartetError)}
            # A fault of one of them may pass, so that is what is told.
            reason = "INTERNAL" if "INTERNAL" in reasons else min(reasons)
            raise QuartetError(reason, f"no inference replica can serve run {run_id!r} ({found})")
        raise QuartetError(
            "NOT_READY",
            f"no inference replica serves run {run_id!r} at version {version} yet ({found})",
        )

    async def _held(self, stub: InferenceServiceStub, run_id: str, adapter: bool) -> int | QuartetError:
        """The version of the run that a replica serves, or why it serves none."""
        try:
            model: ipb.GetModelResponse = await unary(stub.GetModel, ipb.GetModelRequest(), timeout_s=ASK_S)
        except QuartetError as error:
            return error
        if model.run_id == run_id and model.HasField("policy_version"):
            return int(model.policy_version)
        for one in model.adapters:
            if one.run_id == run_id:
                return int(one.policy_version)
        if not adapter:
            served = f"serves run {model.run_id!r}" if model.run_id else "serves its own model"
            refused = f"; its last update failed: {model.update_refused}" if model.update_refused else ""
            return QuartetError("NOT_READY", served + refused)
        try:
            request = ipb.LoadAdapterRequest(run_id=run_id)
            loaded: ipb.LoadAdapterResponse = await unary(stub.LoadAdapter, request, timeout_s=LOAD_S)
        except QuartetError as error:
            # What is not the run's own fault may pass: its trainer may be on its way back.
            return error if error.reason == "INVALID_REQUEST" else QuartetError("NOT_READY", error.message)
        return int(loaded.version)

    async def close(self) -> None:
        """Closes every connection; calls under way are cancelled."""
        for channel in self._channels:
            await channel.close()
