"""The base model on replicas that serve nothing yet.

1. Replicas serve the base model from the first adapter on that the trainer publishes. Where nobody has
   published one, as after the start of everything, a run of the gateway's own does, untrained, and is closed
   as soon as it has arrived (runs.py 5).
2. There is one such run at a time; who asks meanwhile waits for it, for as long as the SDK waits for an
   answer, and then asks again. What it failed of is told to who asks next, also when nobody was waiting.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from quartet.errors import QuartetError

from quartet_tinker import paths
from quartet_tinker.adam import Adam
from quartet_tinker.bodies import Lora
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling import Sampling
from quartet_tinker.served import Names, ServedModel
from quartet_tinker.specs import spec_of
from quartet_tinker.trainer import Trainer
from quartet_tinker.training import Run

#: The SDK gives up on an answer after 45 s and asks again.
WAIT_SECONDS: Final = 25.0
#: Every inference service that takes adapters takes one of this rank.
RANK: Final = 1

Lend = Callable[[Run, Callable[[], Awaitable[None]]], Awaitable[None]]


class BaseModel:
    """Has it served. For one event loop."""

    def __init__(
        self, model: ServedModel, trainer: Trainer, sampling: Sampling, publish_s: float, lend: Lend
    ) -> None:
        """`lend` has a run for as long as some work takes."""
        self._model, self._trainer, self._sampling = model, trainer, sampling
        self._publish_s, self._lend = publish_s, lend
        self._origin = f"tk-{secrets.token_hex(8)}:base"
        # Under way, or what it failed of is not told yet.
        self._publishing: asyncio.Task[None] | None = None

    async def ready(self, wanted: str | None) -> None:
        """The base model, by this name, answers. Raises Refused, QuartetError."""
        names = await self._model.names()
        names.check(wanted)
        served = await self._sampling.model()
        if served.run_id:
            raise Refused(
                f"inference serves run {served.run_id}, not the base model: it gets whole models. "
                "Give the gateway replicas that only adapters are published to"
            )
        if served.HasField("policy_version"):
            return
        if self._publishing is None:
            self._publishing = asyncio.create_task(self._publish(names), name="have the base model served")
        publishing = self._publishing
        done, _ = await asyncio.wait({publishing}, timeout=WAIT_SECONDS)
        if not done:
            raise Refused("the base model is not loaded yet; ask again", status=429)
        if self._publishing is publishing:
            self._publishing = None
        publishing.result()

    async def close(self) -> None:
        """End what is under way."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)

    async def _publish(self, names: Names) -> None:
        spec = spec_of(names.folder, Lora(rank=RANK, seed=0), Adam())
        about = {"of": "the gateway, for the base model"}
        run = Run(paths.run_id(self._origin), self._origin, names.name, spec, about)

        async def arrive() -> None:
            try:
                published = await self._trainer.publish(run.run_id, 1)
                await self._sampling.arrival(run.run_id, published.digest, self._publish_s)
            except QuartetError as error:
                if error.reason != "RUN_UNKNOWN":
                    raise
                raise Refused("the trainer was started again meanwhile; ask again", status=429) from error

        await self._lend(run, arrive)
        self._publishing = None  # it may be wanted once more, when everything was started again
