"""Published weights on their way to the replicas.

1. They have arrived when the replicas that can be reached, and one at least, serve those very weights.
2. A replica whose canary of them died will not serve them: it is not waited for.
3. Where none serves them, each is named with what kept it, in its own words: they say what to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.v1 import inference_service_pb2 as pb

from quartet_tinker.refusal import Refused

ASK_SECONDS: Final = 30.0
#: Between two rounds over the replicas.
AGAIN_SECONDS: Final = 0.25
#: How much later than the first one the others may have a version; whoever is later is left behind.
LAG_SECONDS: Final = 30.0
#: Another replica, or this one a little later, may answer.
PASSING: Final = frozenset({"VERSION_UNAVAILABLE", "RUN_NOT_SERVED", "NOT_READY", "OVERLOADED", "DEADLINE"})

log = structlog.get_logger()


class Arrival:
    """Of one version of a run."""

    def __init__(self, run_id: str, digest: bytes, timeout_s: float) -> None:
        """From now on."""
        self._run_id, self._digest, self._timeout_s = run_id, digest, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._one_has_it = asyncio.Event()
        # What kept a replica, by address.
        self._kept: dict[str, str] = {}

    async def wait(self, stubs: Mapping[str, Any]) -> None:
        """Until they are there. Raises Refused, or QuartetError where a replica cannot serve them at all."""
        waiting = [asyncio.create_task(self._at(address, stub)) for address, stub in stubs.items()]
        try:
            await asyncio.wait(waiting, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in waiting:
                if task.done():
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not self._one_has_it.is_set():
            by_whom = "; ".join(f"replica {address}: {why}" for address, why in self._kept.items())
            told = f": {by_whom}" if by_whom else f" within {self._timeout_s:g} s"
            raise Refused(f"no replica serves the weights{told}", category="server")

    async def _at(self, address: str, stub: Any) -> None:
        """Return when this replica serves the weights, or is not worth waiting for."""
        deadline = self._deadline
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                if await served(stub, self._run_id, left_s) == self._digest:
                    self._one_has_it.set()
                    return
            except QuartetError as error:
                if error.reason not in PASSING:
                    raise
                if await self._refuses(address, stub, error) or self._one_has_it.is_set():
                    return
            if self._one_has_it.is_set():
                deadline = min(deadline, time.monotonic() + LAG_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _refuses(self, address: str, stub: Any, error: QuartetError) -> bool:
        """Whether this error of a replica is that the canary died there."""
        self._kept[address] = f"{error.message} ({error.reason})"
        if error.reason != "NOT_READY":
            return False
        try:
            model = await unary(stub.GetModel, pb.GetModelRequest(), timeout_s=ASK_SECONDS)
        except QuartetError:  # it is away, and asked again
            return False
        for one in model.refused_adapters:
            # It is told of a version before this one, too, while the error is another.
            if one.run_id == self._run_id and QuartetError(error.reason, one.why).message == error.message:
                self._kept[address] = one.why
                log.warning("weights refused", run_id=self._run_id, replica=address, why=one.why)
                return True
        return False


async def served(stub: Any, run_id: str, timeout_s: float) -> bytes:
    """The digest of what a replica serves of a run; it is made to serve it. Raises QuartetError."""
    await unary(stub.LoadAdapter, pb.LoadAdapterRequest(run_id=run_id), timeout_s=timeout_s)
    model = await unary(stub.GetModel, pb.GetModelRequest(), timeout_s=ASK_SECONDS)
    return next((bytes(one.weights_digest) for one in model.adapters if one.run_id == run_id), b"")
