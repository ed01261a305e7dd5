"""One model of a script: the requests of its TrainingClient, in their order, on one run of the trainer.

1. Requests are done one after the other in the order of their numbers, 1, 2, 3, ..., whatever order they
   come in; each once (promises.py). One whose predecessor does not come within `gap_seconds` is given up,
   and all later ones with it.
2. A request that is refused changes nothing, and those after it are done; but a step right after a gradient
   request that failed is refused, too, since the script sends both before it has seen either's answer.
3. Where the trainer's answer is lost for good, nothing more is done: what was applied is not known.
4. Adam's constants are those of the first step. Where they are not the run's, the run is made again with
   them, gets the same gradients and saves the same states; until then these gradients are kept here, up to
   MAX_REPLAY_BYTES. A state of before the first step has the run's first weights and no moments: if all ends
   between its being deleted and saved again, nothing is lost that was trained.
5. A state is deleted between two requests: one that is being made again (4) is not brought back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import structlog
from quartet.errors import QuartetError
from quartet.kit.awake import awake_s
from quartet.v1 import trainer_service_pb2 as pb

from quartet_tinker import adam, losses
from quartet_tinker import datum as datums
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.promises import PROTO, Answer, Promise, answered, failed, fulfil
from quartet_tinker.refusal import USERS, Refused
from quartet_tinker.trainer import Trainer

T = TypeVar("T")

MAX_REPLAY_BYTES: Final = 256 * 2**20
#: Requests that wait for an earlier one: a batch is cut into pieces that come in any order.
MAX_WAITING: Final = 4096
#: A weight travels as float32.
LARGEST: Final = float(np.finfo(np.float32).max)
FROM_STATE: Final = "make another client with create_training_client_from_state_with_optimizer"

log = structlog.get_logger()


@dataclass(frozen=True)
class Run:
    """A run of the trainer, and the model of a script that it was created for."""

    run_id: str
    # What is between tinker:// and /weights/ in its paths.
    origin: str
    base_model: str
    spec: pb.RunSpec
    # What the script calls it by; of a client made from a state, the newest.
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Request:
    promise: Promise
    work: Callable[[], Coroutine[Any, Any, Answer]]


class Training:
    """The queue of one model, and where its run stands. For one event loop."""

    def __init__(self, run: Run, trainer: Trainer, gap_seconds: float, note: Callable[[Run], None]) -> None:
        """`note` is told of a run that is made again with other settings."""
        self.run = run
        self._trainer, self._gap_seconds, self._note = trainer, gap_seconds, note
        self._next, self._waiting = 1, dict[int, _Request]()
        self._arrived = asyncio.Event()
        self._applied = 0
        self._broken = ""
        self._spoiled = ""
        # What was done before the first step: gradients, and states by their names.
        self._replay: list[list[pb.TrainingSample] | str] | None = []
        self._replay_bytes = 0
        self._published = False
        # States that were saved by this client. One that goes on from a state may save that name again, as
        # the cookbook does: what it replaces is what it was made from, or has turned away from.
        self._names: set[str] = set()
        # Of the request under way, or of who deletes a state.
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        # The last call of the trainer that changes the run.
        self._call: asyncio.Future[Any] | None = None

    def begin(self, state: pb.RunState) -> None:
        """The run is open and stands here."""
        self._applied = int(state.applied_seq_id)
        spec = self.run.spec
        continued = bool(spec.initial_state) and not spec.fresh_optimizer
        if state.policy_version or state.applied_seq_id or continued:
            self._replay = None  # its gradients so far are not known here, and a state has its constants
        self._task = asyncio.create_task(self._work(), name=f"requests of {self.run.run_id}")

    async def close(self, *, settled: bool = False) -> None:
        """Do no more requests; those that wait are refused.

        `settled`: wait for the call that the trainer has begun. It goes on with it, whoever leaves, and takes
        no other one of the run before.
        """
        if self._task is None:
            return
        self._task.cancel()
        refusal = Refused(f"its model was closed before its turn came; {FROM_STATE}")
        for request in self._waiting.values():
            request.promise.settle(failed(refusal))
        self._waiting.clear()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._call is not None:
            if not settled:
                self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)

    def submit(self, seq_id: int, promise: Promise, work: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        """Do this request when it is its turn. Raises Refused."""
        if seq_id < self._next:
            raise Refused(f"request {seq_id} of this model was done or given up; its answer is not kept")
        if len(self._waiting) >= MAX_WAITING and not self.is_next(seq_id):
            raise Refused(f"{MAX_WAITING} requests of this model wait; send them later", status=429)
        self._waiting[seq_id] = _Request(promise, work)
        self._arrived.set()

    def is_next(self, seq_id: int) -> bool:
        """Whether all that wait wait for this request."""
        return seq_id == self._next

    # -- what is done

    async def forward_backward(self, request: wire.ForwardBackwardRequest) -> Answer:
        """Log-probabilities, losses and, unless forward_only, gradients."""
        try:
            answer = await self._passes(request)
        except (Refused, QuartetError) as error:
            if not request.forward_only:
                self._spoiled = error.sentence if isinstance(error, Refused) else error.message
            raise
        if not request.forward_only:
            self._spoiled = ""
        return answer

    async def optim_step(self, params: Mapping[str, Any]) -> Answer:
        """One step of Adam."""
        if self._spoiled:
            raise Refused(f"the forward_backward before it failed, so nothing is stepped: {self._spoiled}")
        learning_rate, wanted = adam.read(params)
        fixed = adam.of(self.run.spec.optimizer)
        if wanted != fixed:
            await self._make_again(fixed, wanted)
        done = await self._apply(lambda seq: self._trainer.optim_step(self.run.run_id, seq, learning_rate))
        self._replay = None
        return answered(
            metrics={
                "grad_norm": done.grad_norm,
                "learning_rate": done.learning_rate,
                "policy_version": float(done.policy_version),
                "skipped_nonfinite": float(done.skipped_nonfinite),
            }
        )

    async def save_state(self, name: str, overwrite: bool) -> Answer:
        """Save the run under a name."""
        if name in self._names and not overwrite:
            raise Refused(f"this client saved a state {name!r} before; give another name, or overwrite=True")
        await self._save(name)
        self._names.add(name)
        if self._replay is not None:
            self._replay.append(name)
        return answered(path=f"tinker://{self.run.origin}/weights/{name}", type="save_weights")

    async def load_state(self, name: str) -> None:
        """Return to a state of this run."""
        seq = self._applied + 1
        state = await self._changing(self._trainer.load(self.run.run_id, seq, name))
        self._applied, self._replay, self._spoiled = int(state.applied_seq_id), None, ""

    async def delete_state(self, name: str) -> bool:
        """Delete a state of this run, whose name is free from then on; whether there was one."""
        async with self._turn:
            found = await self._trainer.delete_state(self.run.run_id, self.run.spec, name)
            self._names.discard(name)
            if self._replay is not None:
                self._replay = [done for done in self._replay if done != name]
            return found

    async def publish(self) -> pb.PublishWeightsResponse:
        """Make the weights a version that inference can serve."""
        self._published = True
        return await self._apply(lambda seq: self._trainer.publish(self.run.run_id, seq))

    # -- how

    async def _passes(self, request: wire.ForwardBackwardRequest) -> Answer:
        datums.check_known("the request", request, *request.loss_fn_config_v2.values())
        loss_fn = request.loss_fn
        given = {
            **request.loss_fn_config,
            **{key: _setting(value) for key, value in request.loss_fn_config_v2.items()},
        }
        config = losses.settings(loss_fn, given)
        if not request.data:
            raise Refused("data is empty; give at least one datum")
        data = await asyncio.to_thread(_read, request)
        samples = [datums.whole(one) for one in data]
        logprobs = await self._certain(self._trainer.forward(self.run.run_id, samples))
        pairs = [
            losses.evaluated(loss_fn, config, logp_N, one.inputs)
            for one, logp_N in zip(data, logprobs, strict=True)
        ]
        for index, (loss_N, weight_N) in enumerate(pairs):
            if not (np.isfinite(loss_N).all() and (np.abs(weight_N) < LARGEST).all()):
                raise Refused(f"data[{index}]: the loss or its gradient is not a finite number")
        if not request.forward_only:
            await self._accumulate(
                [datums.weighted(one, weight_N) for one, (_, weight_N) in zip(data, pairs, strict=True)]
            )
        metrics = {
            "loss:sum": float(sum(loss_N.sum() for loss_N, _ in pairs)),
            "tokens:sum": float(sum(np.count_nonzero(weight_N) for _, weight_N in pairs)),
        }
        logprobs = [
            datums.spread(one, logp_N, float("nan")) for one, logp_N in zip(data, logprobs, strict=True)
        ]
        elementwise = [datums.spread(one, loss_N, 0.0) for one, (loss_N, _) in zip(data, pairs, strict=True)]
        body = await asyncio.to_thread(datums.output, logprobs, elementwise, metrics)
        return Answer(body, PROTO)

    async def _accumulate(self, samples: list[pb.TrainingSample]) -> None:
        await self._apply(partial(self._trainer.forward_backward, self.run.run_id, samples))
        if self._replay is not None:
            self._replay.append(samples)
            self._replay_bytes += sum(sample.ByteSize() for sample in samples)
            if self._replay_bytes > MAX_REPLAY_BYTES:
                self._replay = None

    async def _save(self, name: str) -> None:
        await self._apply(lambda seq: self._trainer.save(self.run.run_id, seq, name))

    async def _make_again(self, fixed: adam.Adam, wanted: adam.Adam) -> None:
        """Close the run and create it with these constants; it gets the gradients and states that it had."""
        told = f"adam_params.{fixed.difference(wanted)} is not what the run has, {wanted.difference(fixed)}"
        if self._replay is None:
            raise Refused(
                f"{told}; a run keeps what its first step said, or the state that it went on from, and only "
                "learning_rate may change (create_training_client_from_state takes a state's weights alone)"
            )
        run_id, replay = self.run.run_id, self._replay
        spec = pb.RunSpec()
        spec.CopyFrom(self.run.spec)
        spec.optimizer.CopyFrom(wanted.spec())
        made = replace(self.run, spec=spec)
        self._note(made)  # first: where the disk does not take it, nothing has changed
        await self._certain(self._trainer.close(run_id))
        try:
            if self._names:  # a run with states is opened at one, with their constants
                await self._certain(self._trainer.delete_states(run_id, self.run.spec))
            await self._certain(self._trainer.create(run_id, spec))
        except QuartetError as error:  # such as another's run in its place: it is closed all the same
            self._broken = (
                "the run is closed and could not be made again with what its first step says "
                f"({error.message}); nothing was trained yet, so begin anew with create_lora_training_client"
            )
            raise Refused(self._broken, category="server") from error
        self.run = made
        self._applied = 0
        if self._published:
            await self._apply(lambda seq: self._trainer.publish(run_id, seq))
        for done in replay:
            if isinstance(done, str):
                await self._save(done)
            else:
                await self._apply(partial(self._trainer.forward_backward, run_id, done))
        log.info("run made again with the first step's constants", run_id=run_id)

    async def _apply(self, call: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """The run's next call."""
        seq_id = self._applied + 1
        result = await self._changing(call(seq_id))
        self._applied = seq_id
        return result

    async def _changing(self, call: Coroutine[Any, Any, T]) -> T:
        """A call that changes the run; it is not left with the request (`close`)."""
        self._call = asyncio.ensure_future(call)
        return await self._certain(asyncio.shield(self._call))

    async def _certain(self, call: Awaitable[T]) -> T:
        """A call after whose failure it is known that nothing was applied; else nothing more is done."""
        try:
            return await call
        except QuartetError as error:
            if error.reason == "RUN_UNKNOWN":
                self._broken = f"the trainer has this run no more (it was started again); {FROM_STATE}"
                raise Refused(self._broken) from error
            if error.reason not in USERS:
                self._broken = f"the trainer failed or did not answer ({error.message}); {FROM_STATE}"
                raise Refused(self._broken, category="server") from error
            raise

    # -- in which order

    async def _work(self) -> None:
        while True:
            request = await self._take()
            await fulfil(request.promise, self._unless_broken(request))

    async def _unless_broken(self, request: _Request) -> Answer:
        async with self._turn:
            if self._broken:
                raise Refused(self._broken)
            return await request.work()

    async def _take(self) -> _Request:
        """The next request; where it does not come although later ones are there, the earliest of these."""
        while self._next not in self._waiting:
            self._arrived.clear()
            if not await self._comes():
                self._broken = self._broken or (
                    f"request {self._next} of this model never came, so none after it is done; {FROM_STATE}"
                )
                self._next = min(self._waiting)
        request = self._waiting.pop(self._next)
        self._next += 1
        return request

    async def _comes(self) -> bool:
        """Whether another request comes, which is waited for while others wait for gap_seconds; of a stretch
        in which the gateway did not run, those of that time are still to be read."""
        give_up = awake_s() + self._gap_seconds
        while (left_s := give_up - awake_s()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if self._waiting else None):
                    return await self._arrived.wait()
        return False


def _setting(value: wire.LossConfigValue) -> float | str:
    return value.text if value.WhichOneof("value") == "text" else value.number


def _read(request: wire.ForwardBackwardRequest) -> list[datums.Datum]:
    return [datums.read(index, datum, request.loss_fn) for index, datum in enumerate(request.data)]
