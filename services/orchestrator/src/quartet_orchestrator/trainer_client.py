"""The trainer as the orchestrator reaches it: one method per RPC, each with its deadline. Raises
QuartetError."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

import grpc
from quartet.errors import QuartetError
from quartet.kit.call import stream, unary
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.run.lora import CONTRACT_KEYS
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1 import weights_pb2 as wpb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet.v1.weights_pb2_grpc import WeightServiceStub

# Looking for a folder; for a hub id over a network. Well below what callers of SubmitRun wait.
CHECK_S = 8.0
# Reading a run's state computes nothing.
READ_S = 10.0
# Loading a large model, or its saved state, from a slow disk.
CREATE_S = 1800.0
# The largest batch on the slowest machine; a trainer that is frozen is noticed by its connection long before.
COMPUTE_S = 3600.0
# Removing terabytes from a slow disk.
DELETE_S = 600.0
# Closing waits for the call under way; whoever does not wait leaves it to the trainer, which finishes it. A
# state that is saved first is waited for like any.
CLOSE_S = 10.0
# What whoever reads a refusal wrote, by the contract's word for it.
WRITTEN = {
    "base_model": "model",
    "reference.model": "algorithm.reference.model",
    "custom_loss": "algorithm.custom",
    "custom_args": "algorithm.custom_args",
    "keep_states": "ckpt",
    "fresh_optimizer": "initial_optimizer",
    **CONTRACT_KEYS,
}


class TrainerClient:
    """A connection to the trainer, shared by all runs."""

    def __init__(self, address: str, security: ClientSecurity) -> None:
        self.address = address
        self._channel = connect(address, security=security)
        self._stub = TrainerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._weights = WeightServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def check(
        self, spec: tpb.RunSpec, custom_loss: str, custom_args: str, keep_states: int
    ) -> tpb.CheckRunResponse:
        """Whether the trainer knows nothing against a run that has so many states at once; `custom_loss` is
        told as the run's `algorithm.custom`, the others likewise. What it says of the model."""
        request = tpb.CheckRunRequest(
            spec=spec, custom_loss=custom_loss, custom_args=custom_args, keep_states=keep_states
        )
        try:
            checked: tpb.CheckRunResponse = await unary(self._stub.CheckRun, request, timeout_s=CHECK_S)
        except QuartetError as error:
            if error.metadata.get("key") not in WRITTEN:
                raise
            raise _in_words_of_a_run(error) from error
        return checked

    async def create(self, run_id: str, spec: tpb.RunSpec, keep_last: int) -> tpb.RunState:
        """Creates or finds the run, of whose newest states so many stay; where it stands. A refused
        base_model is told as the run's `model`."""
        request = tpb.CreateRunRequest(run_id=run_id, spec=spec, keep_last=keep_last)
        try:
            response: tpb.CreateRunResponse = await unary(self._stub.CreateRun, request, timeout_s=CREATE_S)
        except QuartetError as error:
            if error.metadata.get("key") not in WRITTEN:
                raise
            raise _in_words_of_a_run(error) from error
        return response.run

    async def get(self, run_id: str) -> tpb.RunState:
        """Where the run stands; RUN_UNKNOWN where the trainer does not have it."""
        response: tpb.GetRunResponse = await unary(
            self._stub.GetRun, tpb.GetRunRequest(run_id=run_id), timeout_s=READ_S
        )
        return response.run

    async def close_run(self, run_id: str, save_at_seq_id: int) -> None:
        """Frees what the run takes there; saves it first if it stands at this call (0: never)."""
        request = tpb.CloseRunRequest(run_id=run_id, save_at_seq_id=save_at_seq_id)
        await unary(self._stub.CloseRun, request, timeout_s=COMPUTE_S if save_at_seq_id else CLOSE_S)

    async def forward_backward(
        self, frames: Iterable[tpb.ForwardBackwardRequest]
    ) -> tpb.ForwardBackwardResponse:
        """Adds the gradients of what the frames hold, from start to commit; its loss and diagnostics."""
        response: tpb.ForwardBackwardResponse = await unary(
            self._stub.ForwardBackward, iter(frames), timeout_s=COMPUTE_S
        )
        return response

    async def optim_step(self, run_id: str, seq_id: int) -> tpb.OptimStepResponse:
        """Steps with the gradients so far; says whether the step was skipped."""
        request = tpb.OptimStepRequest(run_id=run_id, seq_id=seq_id)
        response: tpb.OptimStepResponse = await unary(self._stub.OptimStep, request, timeout_s=COMPUTE_S)
        return response

    async def publish(self, run_id: str, seq_id: int) -> tpb.PublishWeightsResponse:
        """Makes the weights a version; its number and digest."""
        request = tpb.PublishWeightsRequest(run_id=run_id, seq_id=seq_id)
        response: tpb.PublishWeightsResponse = await unary(
            self._stub.PublishWeights, request, timeout_s=COMPUTE_S
        )
        return response

    async def has_canary(self, run_id: str, version: int) -> bool:
        """Whether a published version says what a replica has to compute: where that are no numbers it does
        not."""
        return (await self._manifest(run_id, version)).HasField("canary")

    async def digest(self, run_id: str, version: int) -> bytes:
        """Of a version that it publishes; VERSION_UNKNOWN where it does not, or does no more."""
        return (await self._manifest(run_id, version)).digest

    async def _manifest(self, run_id: str, version: int) -> wpb.WeightManifest:
        request = wpb.GetManifestRequest(run_id=run_id, version=version)
        response: wpb.GetManifestResponse = await unary(self._weights.GetManifest, request, timeout_s=READ_S)
        return response.manifest

    async def save(
        self, run_id: str, seq_id: int, name: str, *, export_model: bool, keep: bool
    ) -> tpb.SaveStateResponse:
        """Saves a state in the place of an older one of that name, to stay or not, and the model beside it
        where asked."""
        request = tpb.SaveStateRequest(
            run_id=run_id, seq_id=seq_id, name=name, export_model=export_model, keep=keep
        )
        response: tpb.SaveStateResponse = await unary(self._stub.SaveState, request, timeout_s=COMPUTE_S)
        return response

    async def states(self, run_id: str) -> list[tpb.SavedState]:
        """The complete states of the run on the disk of the trainer."""
        response: tpb.ListStatesResponse = await unary(
            self._stub.ListStates, tpb.ListStatesRequest(run_id=run_id), timeout_s=READ_S
        )
        return list(response.states)

    async def delete_states(
        self, run_id: str, spec: tpb.RunSpec | None, *, dry_run: bool
    ) -> tpb.DeleteStatesResponse:
        """Deletes all saved states of a run that is not open, or only says which there are; RUN_CONFLICT
        where these are of another one than the spec's."""
        request = tpb.DeleteStatesRequest(run_id=run_id, dry_run=dry_run, spec=spec)
        timeout_s = READ_S if dry_run else DELETE_S
        response: tpb.DeleteStatesResponse = await unary(
            self._stub.DeleteStates, request, timeout_s=timeout_s
        )
        return response

    async def fetch_model(
        self, request: tpb.FetchModelRequest
    ) -> AsyncGenerator[tpb.FetchModelResponse, None]:
        """The frames of an exported model; the call ends with whoever leaves them."""
        call = self._stub.FetchModel(request)
        try:
            async for frame in stream(call, idle_timeout_s=IDLE_TIMEOUT_SECONDS):
                yield frame
        finally:
            call.cancel()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection."""
        return self._channel

    async def close(self) -> None:
        """Closes the connection; calls under way are cancelled."""
        await self._channel.close()


def _in_words_of_a_run(error: QuartetError) -> QuartetError:
    """A refusal of one of WRITTEN, by the key of the run's file."""
    named, value, remedy = (error.metadata.get(key, "") for key in ("key", "value", "remedy"))
    # A number is told as one.
    shown = value if error.message.startswith(f"{named} = {value} ") else repr(value)
    why = error.message.removeprefix(f"{named}: ").removeprefix(f"{named} = {shown} is refused: ")
    said = f"{WRITTEN[named]} = {shown} is refused by the trainer: {why}"
    return QuartetError(error.reason, said, key=WRITTEN[named], value=value, remedy=remedy)
