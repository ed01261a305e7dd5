"""The base model on replicas that serve nothing yet.

1. Replicas serve the base model from the first adapter on that the trainer publishes. Where nobody has
   published one, as after the start of everything, a run of the gateway's own does, untrained, and is closed
   as soon as it has arrived.
2. There is one such run at a time; who asks meanwhile waits for it, for as long as the SDK waits for an
   answer, and then asks again.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import structlog
from quartet.errors import QuartetError

from quartet_tinker import paths
from quartet_tinker.adam import Adam
from quartet_tinker.bodies import Lora
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling import Sampling
from quartet_tinker.served import Names, ServedModel
from quartet_tinker.specs import Notes, spec_of
from quartet_tinker.trainer import Trainer
from quartet_tinker.training import Run

#: The SDK gives up on an answer after 45 s and asks again.
WAIT_SECONDS: Final = 25.0
#: Like that of a script's: every inference service that takes adapters takes one of this rank.
RANK: Final = 8

log = structlog.get_logger()


class BaseModel:
    """Has it served. For one event loop."""

    def __init__(
        self, model: ServedModel, trainer: Trainer, sampling: Sampling, notes: Notes, publish_s: float
    ) -> None:
        self._model, self._trainer, self._sampling, self._notes = model, trainer, sampling, notes
        self._publish_s = publish_s
        self._publishing: asyncio.Task[None] | None = None

    async def ready(self, wanted: str | None) -> None:
        """The base model, by this name, answers. Raises Refused, QuartetError."""
        names = await self._model.names()
        names.check(wanted)
        served = await self._sampling.model()
        if served.run_id:
            raise Refused(
                f"inference serves run {served.run_id}, not the base model; it does once a training client "
                "has published weights (save_weights_and_get_sampling_client)"
            )
        if served.HasField("policy_version"):
            return
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._publish(names), name="have the base model served")
        done, _ = await asyncio.wait({self._publishing}, timeout=WAIT_SECONDS)
        if not done:
            raise Refused("the base model is not loaded yet; ask again", status=429)
        self._publishing.result()

    async def close(self) -> None:
        """End what is under way."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)

    async def _publish(self, names: Names) -> None:
        origin = f"tk-{secrets.token_hex(8)}:base"
        spec = spec_of(names.folder, Lora(rank=RANK, seed=0), Adam())
        run = Run(paths.run_id(origin), origin, names.name, spec, {"of": "the gateway, for the base model"})
        self._notes.keep(run)
        try:
            await self._trainer.create(run.run_id, spec)
            published = await self._trainer.publish(run.run_id, 1)
            await self._sampling.arrival(run.run_id, published.digest, self._publish_s)
        finally:
            try:
                await self._trainer.close(run.run_id)
                self._notes.keep(run, is_open=False)
            except (QuartetError, Refused) as error:  # the next gateway closes it
                log.warning("run not closed", run_id=run.run_id, why=str(error))
