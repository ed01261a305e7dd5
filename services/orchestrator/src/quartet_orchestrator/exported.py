"""The model of a run, handed on from the disk of its trainer to whoever has the run.

1. It comes piece by piece, the next one when the last was taken: one is in memory, whatever the model's size.
2. The trainer is told which run is meant, where that is known: another one of its name may have left states
   there.
3. What the trainer refuses is refused in its words. That it refuses the orchestrator is no fault of the
   caller's, and is told as what it is.
4. A trainer that is silent for IDLE_TIMEOUT_SECONDS ends the stream; the caller goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from quartet.errors import QuartetError
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb

from quartet_orchestrator.specs import run_spec
from quartet_orchestrator.trainer_client import TrainerClient


@dataclass(frozen=True)
class Keeper:
    """Who has the states of a run."""

    trainer: TrainerClient
    #: What it was created with there; None where nobody can read that.
    spec: tpb.RunSpec | None


def keeper_of(
    run_id: str, config: RunConfig | None, earlier_ends: Sequence[int], trainer: TrainerClient | None
) -> Keeper:
    """`config` is None where nobody can read it. Errors: INVALID_REQUEST."""
    if trainer is None or (config is not None and config.external_trainer):
        why = "is trained by somebody else's program, which has its weights; ask there"
        raise QuartetError("INVALID_REQUEST", f"run {run_id!r} {why}", field="run_id", value=run_id)
    return Keeper(trainer, None if config is None else run_spec(config, earlier_ends))


async def handed_on(
    keeper: Keeper, asked: pb.FetchRunModelRequest
) -> AsyncGenerator[pb.FetchRunModelResponse, None]:
    """Manifest and chunks, without the trainer's signs of life. Errors: those of FetchModel."""
    trainer = keeper.trainer
    request = tpb.FetchModelRequest(
        run_id=asked.run_id, state=asked.state, adapter=asked.adapter, spec=keeper.spec
    )
    if asked.HasField("resume"):
        request.resume.CopyFrom(asked.resume)
    try:
        async with aclosing(trainer.fetch_model(request)) as frames:
            async for frame in frames:
                match frame.WhichOneof("frame"):
                    case "manifest":
                        yield pb.FetchRunModelResponse(manifest=frame.manifest)
                    case "chunk":
                        yield pb.FetchRunModelResponse(chunk=frame.chunk)
    except QuartetError as error:
        if error.reason != "UNAUTHENTICATED" and "grpc_code" not in error.metadata:
            raise
        # Said as by the orchestrator it would be about the caller's token, or about the orchestrator.
        reason = "NOT_READY" if error.reason == "UNAUTHENTICATED" else error.reason
        told = f"the trainer at {trainer.address} does not answer: {error.message}"
        raise QuartetError(reason, told) from error
