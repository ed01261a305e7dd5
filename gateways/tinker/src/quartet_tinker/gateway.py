"""What each request of the SDK does: sessions, models, their states (samplers.py: sampling). No HTTP.

1. A session ends when its script finishes it, or is silent for session_seconds; its runs are closed then, and
   its promises fail. Whoever ends it waits for FINISH_SECONDS at most, but for the gateway's own end.
2. Ids are made from the session and the number that the SDK gives, so that a repeated request finds what its
   first arrival made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.kit.awake import awake_s

from quartet_tinker import bodies, paths
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.adam import Adam
from quartet_tinker.base_model import BaseModel
from quartet_tinker.checkpoints import Checkpoints
from quartet_tinker.config import GatewayConfig
from quartet_tinker.promises import Answer, Promise, Promises, answered
from quartet_tinker.refusal import Refused
from quartet_tinker.runs import Runs
from quartet_tinker.samplers import Samplers
from quartet_tinker.sampling import Sampling
from quartet_tinker.served import ServedModel
from quartet_tinker.sessions import Session, Sessions
from quartet_tinker.specs import Notes, spec_of
from quartet_tinker.trainer import Trainer
from quartet_tinker.training import Run, Training

SWEEP_SECONDS: Final = 5.0
#: The trainer finishes the call under way before it closes a run. A script that is stopped then does not
#: wait for it.
FINISH_SECONDS: Final = 20.0
#: Of gradient requests that wait or are under way, over all models; and the next one of each, which those
#: that have room wait for.
MAX_WAITING_BYTES: Final = 1024 * 2**20
#: What bodies.py takes without heeding it; the SDK logs it as a warning.
UNHEEDED: Final = (
    "Quartet adapts attention and MLP layers; the unembedding stays as it is, whatever train_unembed says. "
    "ttl_seconds is not kept: the trainer keeps the newest states of a run, whatever their age. "
    "The provenance of tokens is not read."
)

log = structlog.get_logger()


class Gateway:
    """Everything behind the routes. For one event loop."""

    def __init__(self, config: GatewayConfig, trainer: Trainer, sampling: Sampling) -> None:
        self._config, self._sampling = config, sampling
        self.promises = Promises()
        self.sessions = Sessions(config.max_sessions)
        self._waiting_bytes = 0
        self._closing: set[asyncio.Future[list[None]]] = set()
        self.model = ServedModel(config, sampling)
        notes = Notes(config.runs_dir)
        self._base = BaseModel(self.model, trainer, sampling, config.publish_seconds, self._lend)
        self.samplers = Samplers(config, sampling, self.sessions, self.promises, self.model, self._base)
        self._runs = Runs(config, trainer, self.sessions, self.samplers, notes, self.finish)
        self.checkpoints = Checkpoints(trainer, self.sessions, notes)

    # -- sessions

    def create_session(self, body: bodies.CreateSession) -> dict[str, Any]:
        """A new one."""
        body.check()
        session_id = self.sessions.make(body.user_metadata, body.display_name).session_id
        said = body.model_dump(exclude={"type", "project_id"}, exclude_defaults=True)
        log.info("session", session_id=session_id, **said)
        return {"type": "create_session", "session_id": session_id, "warning_message": UNHEEDED}

    def heartbeat(self, session_id: str) -> None:
        """A script is there."""
        self.sessions.find(session_id)

    async def finish(self, session_id: str, why: str) -> None:
        """End a session; idempotent."""
        session = self.sessions.take_out(session_id)
        if session is None:
            return
        self.promises.fail(session_id, Refused("the session has ended"))
        with suppress(TimeoutError):  # it goes on by itself
            async with asyncio.timeout(FINISH_SECONDS):
                await self._give_back(list(session.models.values()))
        log.info("session ended", session_id=session_id, why=why)

    async def sweep(self) -> None:
        """End sessions that are silent, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.end_silent(awake_s())

    async def end_silent(self, now: float) -> None:
        """End the sessions that were silent for too long by now."""
        for session_id in self.sessions.silent_since(now - self._config.session_seconds):
            await self.finish(session_id, "its script is silent")

    async def tidy(self) -> None:
        """Close the runs that a gateway before this one left open: their scripts are told to begin again.

        Then, until cancelled, those that a trainer which was away did not close.
        """
        await self._runs.tidy()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self._runs.close_again()

    async def close(self) -> None:
        """End every session."""
        every = self.sessions.silent_since(math.inf)
        await asyncio.gather(*(self.finish(session_id, "the gateway ends") for session_id in every))
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self.promises.close()
        await self._base.close()

    # -- models

    def create_model(self, body: bodies.CreateModel, raw: bytes) -> Promise:
        """A new run of the trainer."""
        session = self.sessions.find(body.session_id)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"
        return self.promises.begin(
            f"{model_id}:0", raw, session.session_id, self._create(session, model_id, body)
        )

    async def _create(self, session: Session, model_id: str, body: bodies.CreateModel) -> Answer:
        names = await self.model.names()
        names.check(body.base_model)
        if body.lora_config is None:
            raise Refused("lora_config is missing; LoRA adapters are trained (create_lora_training_client)")
        body.optimizer_config.check()
        spec = spec_of(names.folder, body.lora_config, Adam(**self._config.adam.model_dump()))
        run = Run(paths.run_id(model_id), model_id, names.name, spec, body.user_metadata or {})
        await self._runs.open(session, run)
        return answered(model_id=model_id, type="create_model")

    async def model_info(self, model_id: str) -> dict[str, Any]:
        """What a model is."""
        run = self.sessions.model(model_id)[1].run
        tokenizer = (await self.model.names()).tokenizer
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": run.base_model,
            "model_data": {"model_name": run.base_model, "tokenizer_id": tokenizer},
            "is_lora": True,
            "lora_rank": run.spec.lora.rank,
        }

    def unload(self, model_id: str, raw: bytes) -> Promise:
        """Close a model's run."""
        session = self.sessions.find(model_id)
        return self.promises.begin(f"{model_id}:unload", raw, session.session_id, self._unload(model_id))

    async def _unload(self, model_id: str) -> Answer:
        session, training = self.sessions.model(model_id)
        del session.models[model_id]
        await self._give_back([training])
        return answered(model_id=model_id, type="unload_model")

    def forward_backward(self, request: wire.ForwardBackwardRequest, raw: bytes) -> Promise:
        """Gradients, or log-probabilities alone."""

        async def work(training: Training) -> Answer:
            return await training.forward_backward(request)

        return self._submit(request.model_id, request.seq_id, raw, work, size=len(raw))

    def optim_step(self, body: bodies.OptimStep, raw: bytes) -> Promise:
        """A step of Adam."""

        async def work(training: Training) -> Answer:
            return await training.optim_step(body.params())

        return self._submit(body.model_id, body.seq_id, raw, work)

    def save_weights(self, body: bodies.SaveWeights, raw: bytes) -> Promise:
        """Save a state."""

        async def work(training: Training) -> Answer:
            body.check()
            return await training.save_state(body.path or f"state-{body.seq_id}", body.overwrite)

        return self._submit(body.model_id, body.seq_id, raw, work)

    def save_for_sampler(self, body: bodies.SaveForSampler) -> Promise:
        """Publish the weights, and wait until a replica answers with them."""
        session, _ = self.sessions.model(body.model_id)

        async def work(training: Training) -> Answer:
            body.check()
            published, run = await training.publish(), training.run
            version, digest = int(published.version), published.digest
            await self._sampling.arrival(run.run_id, digest, self._config.publish_seconds)
            if body.path is not None:
                mark = f"{version}-{digest.hex()[: paths.DIGITS]}"
                path = f"tinker://{run.origin}/sampler_weights/{body.path}@{mark}"
                return answered(path=path, type="save_weights_for_sampler")
            inflight = body.kind == "inflight"
            untrained = version == 0 and not run.spec.initial_state
            sampler = self.samplers.now(run.run_id, version, inflight=inflight, untrained=untrained)
            name = session.add(f"publish-{body.model_id.rpartition(':')[2]}-{body.seq_id}", sampler, None)
            return answered(sampling_session_id=name, type="save_weights_for_sampler")

        # A repetition has another sampling_session_seq_id, which says nothing about what is wanted.
        contents = body.model_dump_json(exclude={"sampling_session_seq_id"}).encode()
        return self._submit(body.model_id, body.seq_id, contents, work)

    def load_weights(self, body: bodies.LoadWeights, raw: bytes) -> Promise:
        """Return a model to a state of its run, or make a new model from one."""
        address, number = body.address()
        if body.model_id is not None:

            async def work(training: Training) -> Answer:
                path = body.state()
                if path.run_id != training.run.run_id:
                    raise Refused(
                        f"path = {body.path!r} is a state of another run; make a client of that one with "
                        "create_training_client_from_state_with_optimizer"
                    )
                self.samplers.count_again(training.run.run_id)
                try:
                    await training.load_state(path.name)
                except QuartetError:  # nothing was applied (training.py)
                    self.samplers.count_on(training.run.run_id)
                    raise
                return answered(path=body.path, model_id=body.model_id, type="load_weights")

            return self._submit(address, number, raw, work)
        session = self.sessions.find(address)
        model_id = f"{session.session_id}:train:{number}"
        return self.promises.begin(
            f"{model_id}:0", raw, session.session_id, self._from_state(session, model_id, body)
        )

    async def _from_state(self, session: Session, model_id: str, body: bodies.LoadWeights) -> Answer:
        await self._runs.go_on(session, model_id, body)
        return answered(path=body.path, model_id=model_id, type="load_weights")

    def spend(self, place: bodies.Place, raw: bytes, refused: Refused) -> None:
        """Let a request that is refused at once have its place in its model's order. Raises Refused (429)."""

        async def work(training: Training) -> Answer:
            raise refused

        try:
            self._submit(place.model_id, place.seq_id, raw, work)
        except Refused as full:
            if full.status == 429:  # it comes again
                raise
            # Of a model that is not there, or the number was spent before.

    # -- how

    async def _lend(self, run: Run, work: Callable[[], Awaitable[None]]) -> None:
        await self._runs.lend(run, work)

    async def _give_back(self, models: list[Training]) -> None:
        """Close models and their runs: to the end, since whoever asked for it may be gone before."""

        async def close(training: Training) -> None:
            await training.close()
            await self._runs.close(training.run)

        closing = asyncio.gather(*map(close, models))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def _submit(
        self,
        model_id: str,
        seq_id: int,
        raw: bytes,
        work: Callable[[Training], Coroutine[Any, Any, Answer]],
        *,
        size: int = 0,
    ) -> Promise:
        """The promise of a request that has its place in a model's order, and so many bytes until its end."""
        session, training = self.sessions.model(model_id)
        promise, is_new = self.promises.make(f"{model_id}:{seq_id}", raw, session.session_id)
        if not is_new:
            return promise
        try:
            if self._waiting_bytes + size > MAX_WAITING_BYTES and size and not training.is_next(seq_id):
                raise Refused(f"{MAX_WAITING_BYTES} bytes of requests wait; send it later", status=429)
            training.submit(seq_id, promise, lambda: work(training))
        except Refused:
            self.promises.drop(promise)
            raise

        def ended() -> None:
            self._waiting_bytes -= size

        self._waiting_bytes += size
        promise.at_end = ended
        return promise
