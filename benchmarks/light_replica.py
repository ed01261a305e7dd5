"""A replica without a model: it follows, verifies, holds and relays versions like any other, and that is all.

For benchmarks and fault tests of the weight plane, where an engine would only take the time of the processor.
Prints a JSON line for its address and for every version that it serves.

    python benchmarks/light_replica.py ADDRESS-OF-THE-PUBLISHER [--no-relay]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from quartet.kit import logs
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.memory import tune_allocator
from quartet.kit.server import ServerConfig, Service, start
from quartet.weights.service import SERVICE, add_weight_service
from quartet.weights.sources import Relays
from quartet.weights.tensor import Tensor
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import EngineInfo, ServedWeights
from quartet_inference.relay import Holdings, RelayServicer
from quartet_inference.updates import Adopter, Follower, Publisher

#: One: the versions of a benchmark differ, and the memory is that of one machine.
HELD_VERSIONS = 1
HELD_DELTA_BYTES = 1 << 30


class NoEngine:
    """An engine as far as a follower can see."""

    def __init__(self) -> None:
        self._served: ServedWeights | None = None

    def base_digest(self) -> bytes:
        """None that a version could have."""
        return b""

    def info(self) -> EngineInfo:
        """Nothing but what is served."""
        return EngineInfo("none", "float32", 64, 1, 1, (), self._served, 0, 0, 0, 0, 0.0, False)

    async def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        """Anything fits."""
        return tensors

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        """Serve it, and say so."""
        self._served = weights
        say(run_id=weights.run_id, version=weights.version, digest=weights.digest.hex(), at=time.time())


def say(**line: object) -> None:
    """A line for whoever started this process."""
    print(json.dumps(line), flush=True)


async def follow(publisher_address: str, relays: bool) -> None:
    """Follow and relay until killed."""
    tune_allocator()
    engine: Any = NoEngine()
    holdings = Holdings(HELD_VERSIONS, HELD_DELTA_BYTES)
    service = Service(SERVICE, add_weight_service, RelayServicer(holdings, asyncio.Event()))
    server = await start([service], ServerConfig(), Health())
    say(address=server.address)
    async with connect(publisher_address, bulk=True) as channel:
        publisher = Publisher(channel, "", Relays(ClientSecurity()), server.address if relays else "")
        adopter = Adopter(engine, CanaryWatch(engine, None, lambda why: None), lambda: None)
        await Follower(engine, publisher, holdings, adopter, lambda one: say(refused=one.why)).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("publisher")
    parser.add_argument("--no-relay", action="store_true")
    given = parser.parse_args()
    logs.configure("light-replica", "warning")
    asyncio.run(follow(given.publisher, not given.no_relay))
