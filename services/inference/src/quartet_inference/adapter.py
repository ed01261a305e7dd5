"""One run's adapter: the engine as its follower sees it, and the way of a version into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet.errors import QuartetError
from quartet.weights.fetched import Fetched
from quartet.weights.versions import Version

from quartet_inference.adoption import Adopter
from quartet_inference.canary import CanaryWatch, check_canary
from quartet_inference.engine import Engine, EngineInfo, ServedWeights
from quartet_inference.verdicts import diagnosis


class AdapterView:
    """An engine as the follower of one run's adapter sees it."""

    def __init__(self, engine: Engine, run_id: str) -> None:
        self._engine, self._run_id = engine, run_id

    def info(self) -> EngineInfo:
        """What is served of the run."""
        info = self._engine.info()
        return replace(info, served=of_run(info, self._run_id), out_of_service="")

    def base_digest(self) -> bytes:
        """No adapter is there from the start."""
        return b""


class AdapterAdopter(Adopter):
    """Takes verified versions of one run's adapter into the engine."""

    def __init__(
        self,
        engine: Engine,
        canaries: CanaryWatch,
        on_served: Callable[[], None],
        folder: Path,
        on_whole: Callable[[], None],
    ) -> None:
        """As `Adopter`; adapters are served upon the model of the folder. `on_whole` is called where the run
        publishes a whole model instead."""
        super().__init__(engine, canaries, on_served)
        self._folder = folder
        self._on_whole = on_whole
        #: What it means if the canary of what is in the engine dies.
        self.if_dead = ""

    async def adopt(self, version: Version | Fetched) -> ServedWeights:
        """Serve a version. Errors: INVALID_REQUEST, OVERLOADED, CHECKSUM_MISMATCH; the old one goes on."""
        if not version.manifest.adapter_config:
            self._on_whole()
        made, manifest = await staged(self._engine, version), version.manifest
        weights = ServedWeights(manifest.run_id, int(manifest.version), bytes(manifest.digest))
        await self._engine.swap_adapter(made, weights)
        self.if_dead = diagnosis(manifest, version.tensors, self._folder, self._engine.info())
        self._canaries.swapped(weights, manifest.canary if manifest.HasField("canary") else None)
        self._serving(weights)
        return weights

    async def rename(self, weights: ServedWeights) -> None:
        """Serve the adapter that the engine holds as another version."""
        await self._engine.swap_adapter(None, weights)
        self._canaries.renamed(weights)
        self._serving(weights)


async def staged(engine: Engine, version: Version | Fetched) -> Any:
    """An adapter as its engine takes it. Errors: those of `AdapterAdopter.adopt`; nothing is changed."""
    manifest = version.manifest
    if not manifest.adapter_config:
        raise no_adapter(manifest.run_id)
    made = await engine.stage_adapter(manifest.adapter_config, version.tensors)
    check_canary(manifest, engine.info().vocab_size)
    return made


def of_run(info: EngineInfo, run_id: str) -> ServedWeights | None:
    """What is served of a run's adapter."""
    return next((one for one in info.adapters if one.run_id == run_id), None)


def no_adapter(run_id: str) -> QuartetError:
    """The error of a run that has whole models where its adapter is asked for."""
    return QuartetError(
        "INVALID_REQUEST",
        f"run {run_id} publishes whole models, no adapter; follow it with run_id in the configuration",
        field="run_id",
        value=run_id,
        remedy="name a run with lora whose versions are published as adapters",
    )


def no_place(max_count: int) -> QuartetError:
    """The error of one more adapter than a replica may serve."""
    return QuartetError(
        "OVERLOADED",
        f"as many adapters are served already as adapters.max_count = {max_count} of this replica allows; "
        "raise that and start it again, or stop a run that it serves",
    )
