"""Takes verified versions into the engine.

1. Whatever is refused leaves the old version serving.
2. What is served is watched by its canary from then on, and whoever waits for it is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from quartet.kit import tracing
from quartet.v1 import weights_pb2 as pb
from quartet.weights.fetched import Fetched
from quartet.weights.versions import Version

from quartet_inference.canary import CanaryWatch, check_canary
from quartet_inference.engine import Engine, ServedWeights

log = structlog.get_logger()

OnAdapter = Callable[[Version | Fetched], Awaitable[ServedWeights]]


class Adopter:
    """Takes verified versions into the engine."""

    def __init__(
        self,
        engine: Engine,
        canaries: CanaryWatch,
        on_served: Callable[[], None],
        on_adapter: OnAdapter | None = None,
    ) -> None:
        """`on_served` is called after every change; `on_adapter` takes versions that are adapters."""
        self._engine, self._canaries, self._on_served = engine, canaries, on_served
        self._on_adapter = on_adapter

    async def adopt(self, version: Version | Fetched) -> ServedWeights:
        """Serve a version. Errors: INVALID_REQUEST, CHECKSUM_MISMATCH; the old one goes on serving."""
        manifest = version.manifest
        if manifest.adapter_config and self._on_adapter is not None:
            adapter = await self._on_adapter(version)
            self._on_served()
            return adapter
        staged = await self._engine.stage(version.tensors)
        # Afterwards: the canary of another model may be of another vocabulary, which is not what is wrong.
        check_canary(manifest, self._engine.info().vocab_size)
        weights = weights_of(manifest)
        with tracing.span("swap"):
            await self._engine.swap(staged, weights)
        canary = manifest.canary if manifest.HasField("canary") else None
        self._canaries.swapped(weights, canary, {one.dtype for one in version.tensors.values()})
        self._serving(weights)
        return weights

    async def rename(self, weights: ServedWeights) -> None:
        """Serve the weights that the engine holds as another version."""
        await self._engine.swap(None, weights)
        self._canaries.renamed(weights)
        self._serving(weights)

    def _serving(self, weights: ServedWeights) -> None:
        pause_ms = self._engine.info().last_update_pause_ms
        log.info("serving version", run_id=weights.run_id, version=weights.version, pause_ms=pause_ms)
        self._on_served()


def weights_of(manifest: pb.WeightManifest) -> ServedWeights:
    """What a manifest describes, as it is served."""
    return ServedWeights(manifest.run_id, int(manifest.version), bytes(manifest.digest))
