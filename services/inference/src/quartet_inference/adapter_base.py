"""The weights that adapters are served upon: the model of the replica's own folder, once it answers.

1. Where the run that the replica follows publishes adapters, its follower makes the folder's model answer:
   whoever needs it waits for that. Where it has published nothing, what the replica has may stay.
2. Where that run publishes whole models, or has ended while others' weights are served, there is none, and
   the error says so.
3. Weights of a run leave only for an adapter that was found to fit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from quartet.errors import QuartetError
from quartet.weights.fetch import get_manifest
from quartet.weights.fetched import Fetched
from quartet.weights.versions import Version

from quartet_inference.adapter import staged
from quartet_inference.engine import Engine, ServedWeights, no_base
from quartet_inference.own_model import OwnModel
from quartet_inference.updates import Publisher, ServedNews

#: What is waited for the follower of the replica's run, which is at work already.
BASE_SECONDS = 60.0

OnBase = Callable[[ServedWeights], None]
#: Work that goes on to its end when its caller is cancelled.
Whole = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


class AdapterBase:
    """Has the replica's own model answer before an adapter does."""

    def __init__(self, engine: Engine, news: ServedNews, own: OwnModel, whole: Whole) -> None:
        """The engine holds what it started with."""
        self._engine = engine
        self._news = news
        self._own = own
        self._whole = whole
        self.on_serving: OnBase = lambda weights: None

    def serves(self) -> bool:
        """Whether adapters can be served."""
        return self._own.serves()

    async def make_way(self, version: Version | Fetched) -> None:
        """Have other weights leave the engine for this adapter.

        Errors: INVALID_REQUEST, OVERLOADED, CHECKSUM_MISMATCH, NOT_READY.
        """
        if self._own.serves():
            return
        if self._engine.info().served is not None:
            await staged(self._engine, version)  # for what does not fit they do not leave
        await self._serve()

    async def ready(self, publisher: Publisher) -> None:
        """Returns once adapters can be served.

        Errors: INVALID_REQUEST, CHECKSUM_MISMATCH, NOT_READY, DEADLINE.
        """
        if self._own.serves():
            return
        self._own.check()
        try:
            followed = await get_manifest(publisher.channel, publisher.run_id)
        except QuartetError as error:
            if error.reason not in ("RUN_UNKNOWN", "VERSION_UNKNOWN"):
                raise
            return await self._without_followed(error)
        if not followed.adapter_config:
            raise no_base(self._engine.info().served)
        if not await self._news.wait_for(lambda _: self._own.serves(), BASE_SECONDS):
            raise QuartetError(
                "DEADLINE", "the folder's own model is not served yet; the log says why", waited_for="model"
            )

    async def _without_followed(self, error: QuartetError) -> None:
        """What the replica follows has published nothing: what it has may stay."""
        served = self._engine.info().served
        if self._own.serves():
            return  # since another adapter asked for it
        if served is None:
            await self._serve()
        elif error.reason == "RUN_UNKNOWN":  # it has ended, and the replica is for it alone
            raise no_base(served) from error
        else:
            raise QuartetError("NOT_READY", f"nothing is there to follow yet: {error.message}") from error

    async def _serve(self) -> None:
        async def serve() -> None:
            self.on_serving(await self._own.serve())

        await self._whole(serve())
