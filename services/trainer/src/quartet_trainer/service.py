"""TrainerService: protobuf in, protobuf out. What the calls do is in run.py, their order in sequence.py,
their life in roster.py."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import xxhash
from quartet.errors import refused
from quartet.kit.shielded import shielded
from quartet.kit.stream import with_heartbeats
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.model_pb2 import ModelManifest

from quartet_trainer.exported import ExportedModels
from quartet_trainer.intake import Batch, Intake, Work
from quartet_trainer.roster import Entry, Roster
from quartet_trainer.sample import Sample
from quartet_trainer.spec import RunSpec, check_name
from quartet_trainer.states import StateInfo
from quartet_trainer.wire import custom_args, loss_spec, run_spec

if TYPE_CHECKING:
    from quartet_trainer.run import Run
    from quartet_trainer.verification import Verification

#: Of the contract: some 400 kB of an answer, which the orchestrator keeps. Batches have thousands at most.
MAX_SAMPLES_TOLD = 1 << 16


class TrainerServicer(rpc.TrainerServiceServicer):
    """The trainer's RPCs over a roster of runs."""

    def __init__(
        self,
        roster: Roster,
        intake: Intake,
        check: Callable[[RunSpec, str, Mapping[str, object], int], pb.CheckRunResponse],
        models: ExportedModels,
        draining: asyncio.Event,
    ) -> None:
        """`check` says what is known against a run with a loss of one's own, by its name, with what that
        gets, and with so many states (admission.py). `draining` ends a fetch of a model that waits: its
        caller goes on elsewhere."""
        self._roster, self._intake, self._check = roster, intake, check
        self._models, self._draining = models, draining

    async def CreateRun(
        self, request: pb.CreateRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateRunResponse:
        """Open or restore a run; what was begun is finished, and found by whoever asks again."""
        creating = self._roster.create(request.run_id, run_spec(request.spec), request.keep_last)
        entry = await shielded(asyncio.create_task(creating))
        return pb.CreateRunResponse(run=_run_state(request.run_id, entry))

    async def CheckRun(
        self, request: pb.CheckRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckRunResponse:
        """What is known against a run; beside the worker, which may train for minutes."""
        args = custom_args(request.custom_args, "custom_args")
        spec = run_spec(request.spec)
        return await asyncio.to_thread(self._check, spec, request.custom_loss, args, request.keep_states)

    async def GetRun(self, request: pb.GetRunRequest, context: grpc.aio.ServicerContext) -> pb.GetRunResponse:
        """A run as it stands."""
        return pb.GetRunResponse(run=_run_state(request.run_id, self._roster.get(request.run_id)))

    async def CloseRun(
        self, request: pb.CloseRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseRunResponse:
        """Free a run's memory; what was begun is finished, whoever stopped waiting."""
        await shielded(asyncio.create_task(self._roster.close(request.run_id, request.save_at_seq_id)))
        return pb.CloseRunResponse()

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[pb.ForwardBackwardRequest], context: grpc.aio.ServicerContext
    ) -> pb.ForwardBackwardResponse:
        """Accumulate the gradients of a batch."""
        return await self._intake.use(request_iterator, self._forward_backward)

    def _forward_backward(self, start: pb.ForwardBackwardStart) -> Work[pb.ForwardBackwardResponse]:
        self._roster.get(start.run_id)
        loss = loss_spec(start.loss)
        if not (math.isfinite(start.normalizer) and start.normalizer > 0):
            raise refused("normalizer", start.normalizer, "give a number above 0, such as the covered tokens")

        def computed(entry: Entry, samples: Sequence[Sample]) -> pb.ForwardBackwardResponse:
            began = time.monotonic()
            done = entry.run.forward_backward(samples, loss, start.normalizer, start.verify_logprobs)
            response = pb.ForwardBackwardResponse(
                loss=done.loss,
                loss_tokens=done.loss_tokens,
                tokens=done.tokens,
                diagnostics=done.diagnostics,
                compute_ms=round(1000 * (time.monotonic() - began)),
            )
            if done.verification is not None:
                response.verification.CopyFrom(_verification(done.verification))
            return response

        async def work(batch: Batch[pb.ForwardBackwardStart]) -> pb.ForwardBackwardResponse:
            digest = b"ForwardBackward" + batch.digest
            return await self._roster.apply(
                start.run_id, start.seq_id, digest, lambda entry: computed(entry, batch.samples)
            )

        return work

    async def OptimStep(
        self, request: pb.OptimStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.OptimStepResponse:
        """Apply the accumulated gradients."""
        rate = request.learning_rate if request.HasField("learning_rate") else None
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise refused("learning_rate", rate, "give a finite number, 0 or more, or leave it out")

        def job(entry: Entry) -> pb.OptimStepResponse:
            done = entry.run.optim_step(rate)
            return pb.OptimStepResponse(
                grad_norm=done.grad_norm,
                learning_rate=done.learning_rate,
                policy_version=done.policy_version,
                skipped_nonfinite=done.skipped_nonfinite,
            )

        return await self._roster.apply(request.run_id, request.seq_id, _digest(request), job)

    async def Forward(
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ForwardResponse]:
        """Log-probabilities of samples."""
        for answer in await self._intake.use(request_iterator, self._forward):
            yield answer

    def _forward(self, start: pb.ForwardStart) -> Work[list[pb.ForwardResponse]]:
        self._roster.get(start.run_id)
        version = start.policy_version if start.HasField("policy_version") else None
        temperature = start.temperature if start.HasField("temperature") else 1.0
        if not (math.isfinite(temperature) and temperature > 0):
            raise refused("temperature", temperature, "give a number above 0")

        async def work(batch: Batch[pb.ForwardStart]) -> list[pb.ForwardResponse]:
            def job(run: Run) -> list[pb.ForwardResponse]:
                # It changes nothing: where nobody hears it, there is nothing to do.
                scores = [] if batch.left else run.forward(batch.samples, version, temperature)
                return [
                    pb.ForwardResponse(logprobs=one.logprobs, best=one.best != 0 if start.tells_best else ())
                    for one in scores
                ]

            return await self._roster.query(start.run_id, job)

        return work

    async def SaveState(
        self, request: pb.SaveStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.SaveStateResponse:
        """Save the run, or export its model too."""
        check_name("name", request.name)

        def job(entry: Entry) -> pb.SaveStateResponse:
            info = self._roster.save(
                entry, request.name, request.seq_id, export_model=request.export_model, keep=request.keep
            )
            return pb.SaveStateResponse(state=_saved(info))

        return await self._roster.apply(request.run_id, request.seq_id, _digest(request), job)

    async def LoadState(
        self, request: pb.LoadStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadStateResponse:
        """Return to a saved state."""
        check_name("name", request.name)
        entry = self._roster.get(request.run_id)
        await self._roster.apply(
            request.run_id,
            request.seq_id,
            _digest(request),
            lambda entry: self._roster.load(entry, request.name),
            moves_to=lambda applied: applied,
        )
        return pb.LoadStateResponse(run=_run_state(request.run_id, entry))

    async def ListStates(
        self, request: pb.ListStatesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListStatesResponse:
        """Complete states, oldest first."""
        return pb.ListStatesResponse(
            states=[_saved(info) for info in self._roster.get(request.run_id).states]
        )

    async def DeleteStates(
        self, request: pb.DeleteStatesRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteStatesResponse:
        """Delete a run's states; what was begun is finished, whoever stopped waiting."""
        spec = run_spec(request.spec) if request.HasField("spec") else None
        deleting = self._roster.delete_states(request.run_id, spec, dry_run=request.dry_run)
        found = await shielded(asyncio.create_task(deleting))
        return pb.DeleteStatesResponse(states=found.states, size_bytes=found.size_bytes)

    async def DeleteState(
        self, request: pb.DeleteStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteStateResponse:
        """Delete a run's states of one name; what was begun is finished, whoever stopped waiting."""
        spec = run_spec(request.spec) if request.HasField("spec") else None
        deleting = self._roster.delete_state(request.run_id, request.name, spec)
        found = await shielded(asyncio.create_task(deleting))
        return pb.DeleteStateResponse(states=found.states, size_bytes=found.size_bytes)

    async def FetchModel(
        self, request: pb.FetchModelRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchModelResponse]:
        """The files of an exported model; off the disk, whether the run is open or not."""

        async def frames() -> AsyncIterator[pb.FetchModelResponse]:
            resume = request.resume if request.HasField("resume") else None
            pieces = self._models.pieces(
                request.run_id,
                request.state,
                adapter=request.adapter,
                resume=resume,
                spec=run_spec(request.spec) if request.HasField("spec") else None,
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    if isinstance(piece, ModelManifest):
                        yield pb.FetchModelResponse(manifest=piece)
                    else:
                        yield pb.FetchModelResponse(chunk=piece)

        def heartbeat() -> pb.FetchModelResponse:
            return pb.FetchModelResponse(heartbeat=Heartbeat())

        told = with_heartbeats(frames(), heartbeat, until=self._draining)
        async with aclosing(told) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishWeightsResponse:
        """Make the current weights a version."""

        def job(entry: Entry) -> pb.PublishWeightsResponse:
            manifest = entry.run.publish()
            assert manifest is not None, "only the rank that serves is called"
            return pb.PublishWeightsResponse(
                version=manifest.version, digest=manifest.digest, payload_bytes=manifest.payload_bytes
            )

        return await self._roster.apply(request.run_id, request.seq_id, _digest(request), job)


def _run_state(run_id: str, entry: Entry) -> pb.RunState:
    state = pb.RunState(
        run_id=run_id,
        applied_seq_id=entry.sequence.applied,
        policy_version=entry.status.policy_version,
        skipped_steps=entry.status.skipped_steps,
        trainable_parameters=entry.status.trainable_parameters,
        parameters=entry.status.parameters,
    )
    if entry.status.published_version is not None:
        state.published_version = entry.status.published_version
    return state


def _verification(found: Verification) -> pb.LogprobVerification:
    told = pb.LogprobVerification(
        max_difference=found.max_difference,
        mean_difference=found.mean_difference,
        tokens_compared=found.tokens_compared,
        tokens_skipped=found.tokens_skipped,
    )
    if len(found.of_samples) <= MAX_SAMPLES_TOLD:
        for difference, tokens in found.of_samples:
            told.sample_differences.append(difference)
            told.sample_tokens.append(tokens)
    return told


def _saved(info: StateInfo) -> pb.SavedState:
    return pb.SavedState(
        name=info.name,
        seq_id=info.seq_id,
        policy_version=info.policy_version,
        size_bytes=info.size_bytes,
        path=str(info.path),
        model_path=str(info.model_path) if info.model_path else "",
        kept=info.kept,
    )


def _digest(request: Any) -> bytes:
    body = request.SerializeToString(deterministic=True)
    return str(request.DESCRIPTOR.name).encode() + xxhash.xxh3_128_digest(body)
