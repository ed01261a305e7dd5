"""The trainer as the gateway calls it: typed, with deadlines, repeated while it is away.

Every mutating call carries its place in the run's sequence, so a repetition is applied once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc
import numpy as np
from quartet.errors import QuartetError
from quartet.kit.call import RETRYABLE, RetryBudget, stream, unary
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

from quartet_tinker.losses import Floats

#: A message is at most 4 MiB; a frame ends at the first sample beyond this.
FRAME_BYTES: Final = 2**20
#: About ten minutes: a trainer that is started again comes back within that, or its caller gives up.
PATIENCE: Final = RetryBudget(max_attempts=120, initial_backoff_s=0.2, max_backoff_s=5.0)
#: A full roster of runs does not empty by itself.
NO_PATIENCE: Final = RetryBudget(max_attempts=3)
#: Loading a model, and what an answer about one takes.
CREATE_SECONDS: Final = 1800.0
ASK_SECONDS: Final = 30.0
#: It waits for the call under way; a trainer that is busy for longer closes the run all the same.
CLOSE_SECONDS: Final = 60.0

CROSS_ENTROPY: Final = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)


class Trainer:
    """A client of TrainerService."""

    def __init__(self, channel: grpc.aio.Channel, train_seconds: float) -> None:
        make_stub: Any = TrainerServiceStub  # generated code has no annotations
        self._stub = make_stub(channel)
        self._seconds = train_seconds

    async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
        """Open a run, at its newest saved state where it has one."""
        request = pb.CreateRunRequest(run_id=run_id, spec=spec)
        response = await unary(self._stub.CreateRun, request, timeout_s=CREATE_SECONDS, budget=NO_PATIENCE)
        return response.run  # type: ignore[no-any-return]

    async def get(self, run_id: str) -> pb.RunState:
        """A run that is open."""
        request = pb.GetRunRequest(run_id=run_id)
        return (await unary(self._stub.GetRun, request, timeout_s=ASK_SECONDS, budget=PATIENCE)).run  # type: ignore[no-any-return]

    async def close(self, run_id: str) -> None:
        """Free a run's memory; its saved states stay."""
        request = pb.CloseRunRequest(run_id=run_id)
        await unary(self._stub.CloseRun, request, timeout_s=CLOSE_SECONDS, budget=NO_PATIENCE)

    async def delete_states(self, run_id: str, spec: pb.RunSpec) -> None:
        """All of a run that is closed and was created with this."""
        request = pb.DeleteStatesRequest(run_id=run_id, spec=spec)
        await self._apply(self._stub.DeleteStates, request)

    async def delete_state(self, run_id: str, spec: pb.RunSpec, name: str) -> bool:
        """Of a run, open or not, that was created with this; whether there was one."""
        request = pb.DeleteStateRequest(run_id=run_id, name=name, spec=spec)
        # Requests of its model wait meanwhile, and the SDK repeats it by itself.
        call = unary(self._stub.DeleteState, request, timeout_s=self._seconds, budget=NO_PATIENCE)
        return bool((await call).states)

    async def forward(self, run_id: str, samples: Sequence[pb.TrainingSample]) -> list[Floats]:
        """Log-probabilities of the covered positions of each sample, under the weights as they are."""
        frames = _frames(pb.ForwardRequest, pb.ForwardStart(run_id=run_id), samples)
        attempt = 0
        while True:
            attempt += 1
            try:
                call = self._stub.Forward(iter(frames), timeout=self._seconds)
                answers = stream(call, idle_timeout_s=self._seconds, sends=True)
                return [np.array(one.logprobs, dtype=np.float64) async for one in answers]
            except QuartetError as error:
                if error.reason not in RETRYABLE or attempt >= PATIENCE.max_attempts:
                    raise
                await asyncio.sleep(PATIENCE.delay_s(attempt, error))

    async def forward_backward(
        self, run_id: str, samples: Sequence[pb.TrainingSample], seq_id: int
    ) -> pb.ForwardBackwardResponse:
        """Add the gradient of minus the weighted sum of log-probabilities."""
        start = pb.ForwardBackwardStart(run_id=run_id, seq_id=seq_id, loss=CROSS_ENTROPY, normalizer=1.0)
        frames = _frames(pb.ForwardBackwardRequest, start, samples)
        return await self._apply(self._stub.ForwardBackward, frames)  # type: ignore[no-any-return]

    async def optim_step(self, run_id: str, seq_id: int, learning_rate: float) -> pb.OptimStepResponse:
        """Apply the gradients."""
        request = pb.OptimStepRequest(run_id=run_id, seq_id=seq_id, learning_rate=learning_rate)
        return await self._apply(self._stub.OptimStep, request)  # type: ignore[no-any-return]

    async def save(self, run_id: str, seq_id: int, name: str) -> pb.SavedState:
        """Save the run's state."""
        request = pb.SaveStateRequest(run_id=run_id, seq_id=seq_id, name=name)
        return (await self._apply(self._stub.SaveState, request)).state  # type: ignore[no-any-return]

    async def load(self, run_id: str, seq_id: int, name: str) -> pb.RunState:
        """Return to a state; the run stands in its sequence where the state stood."""
        request = pb.LoadStateRequest(run_id=run_id, seq_id=seq_id, name=name)
        return (await self._apply(self._stub.LoadState, request)).run  # type: ignore[no-any-return]

    async def states(self, run_id: str) -> list[pb.SavedState]:
        """What can be loaded."""
        request = pb.ListStatesRequest(run_id=run_id)
        response = await unary(self._stub.ListStates, request, timeout_s=ASK_SECONDS, budget=PATIENCE)
        return list(response.states)

    async def publish(self, run_id: str, seq_id: int) -> pb.PublishWeightsResponse:
        """Make the current weights a version; which."""
        request = pb.PublishWeightsRequest(run_id=run_id, seq_id=seq_id)
        return await self._apply(self._stub.PublishWeights, request)  # type: ignore[no-any-return]

    async def _apply(self, method: Any, request: Any) -> Any:
        return await unary(method, request, timeout_s=self._seconds, budget=PATIENCE)


def _frames(kind: Any, start: Any, samples: Sequence[pb.TrainingSample]) -> list[Any]:
    """Start, samples, commit."""
    frames, frame, size = [kind(start=start)], kind(), 0
    for sample in samples:
        grown = sample.ByteSize()
        if size and size + grown > FRAME_BYTES:
            frames.append(frame)
            frame, size = kind(), 0
        frame.batch.samples.add().CopyFrom(sample)
        size += grown
    tokens = sum(len(sample.sample.token_ids) for sample in samples)
    commit = pb.StreamCommit(sample_count=len(samples), token_count=tokens)
    return [*frames, frame, kind(commit=commit)]
