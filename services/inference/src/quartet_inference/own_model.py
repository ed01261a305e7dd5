"""The model of the replica's own folder: what adapters are served upon, as version 0 of no run.

1. While the engine holds it, it is only named. Where a run's weights have replaced it, it is read again, and
   served only if it is, to the bit, the model that the engine was started with.
2. Weights of a run leave only by whoever decides what the base weights are: the follower of the replica's
   run, or the taker of what is pushed. Anybody may name the model where no weights were served yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.weights.manifest import build_manifest
from quartet.weights.tensor import Tensor

from quartet_inference.embedded import model
from quartet_inference.engine import Engine, ServedWeights


class OwnModel:
    """The folder's weights, in the engine or not."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self.folder = engine, folder

    def serves(self) -> bool:
        """Whether it is what answers requests that name no run."""
        served = self._engine.info().served
        return served is not None and served.digest == self._engine.base_digest()

    def check(self) -> None:
        """Whether there is one. Errors: INVALID_REQUEST."""
        if not model.has_weights(self.folder):
            raise QuartetError(
                "INVALID_REQUEST",
                "the folder of this replica has no weights; adapters need the model that they were made for",
                field="model",
                value=str(self.folder),
                remedy="start the replica with the folder that the run was created from, weights included",
            )

    async def serve(self) -> ServedWeights:
        """Make it answer; other weights leave the engine.

        Errors: INVALID_REQUEST, CHECKSUM_MISMATCH, NOT_READY (others came meanwhile).
        """
        self.check()
        staged = None
        if self._engine.info().served is not None:
            staged = await self._engine.stage(await asyncio.to_thread(self._read))
        weights = ServedWeights("", 0, self._engine.base_digest())
        await self._engine.swap(staged, weights)
        return weights

    def _read(self) -> Mapping[str, Tensor]:
        try:
            tensors = model.read(self.folder, self._engine.info().dtype)
        except ConfigError as error:
            raise QuartetError(
                "CHECKSUM_MISMATCH",
                f"the folder of this replica can be read no more ({error}); bring it back as it was",
                what="the folder's own model",
            ) from error
        if bytes(build_manifest("", 0, tensors).digest) != self._engine.base_digest():
            raise QuartetError(
                "CHECKSUM_MISMATCH",
                f"the weights in {str(self.folder)!r} have changed since this replica was started; "
                "start it again",
                what="the folder's own model",
            )
        return tensors
