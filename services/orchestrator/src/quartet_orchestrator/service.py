"""OrchestratorService: proto to runs and back, nothing else. The comments of the proto are the
specification."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from quartet.errors import QuartetError, refused
from quartet.kit.health import Health
from quartet.kit.stream import with_heartbeats
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.journal_pb2 import JournalRecord
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceServicer

from quartet_orchestrator.book import Book
from quartet_orchestrator.exported import handed_on
from quartet_orchestrator.runs import Runs
from quartet_orchestrator.segments import JournalCorrupt

SERVICE_NAME = "quartet.v1.OrchestratorService"
# A message ends at 4 MiB; the rest of a listing belongs to runs of long ago.
LISTING_BYTES = 3 << 20
# A client that has opened a stream and says nothing for so long has lost its way.
START_S = 15.0
# Tag and length of a run inside the listing.
LISTING_OVERHEAD_BYTES = 6


class OrchestratorServicer(OrchestratorServiceServicer):
    """The RPCs of all runs. Its streams end when a drain begins."""

    def __init__(self, runs: Runs, health: Health) -> None:
        self._runs = runs
        self._health = health

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: Any) -> pb.SubmitRunResponse:
        run = await self._runs.submit(request.run_id, request.config_toml, dry_run=request.dry_run)
        return pb.SubmitRunResponse(run=run)

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: Any) -> pb.GetRunStatusResponse:
        return pb.GetRunStatusResponse(run=self._runs.status(request.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        response = listing(self._runs.all())
        if request.services:
            response.services.extend(await self._runs.roll_call(ready=not self._health.why_not(SERVICE_NAME)))
        return response

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        return pb.StopRunResponse(run=self._runs.stop(request.run_id))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        return await self._runs.delete(request.run_id, dry_run=request.dry_run)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        return pb.ResumeRunResponse(run=await self._runs.resume(request.run_id))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        book = self._runs.get(request.run_id)
        if request.after_event > book.journal.last_event:
            raise QuartetError(
                "INVALID_REQUEST",
                f"after_event = {request.after_event} is refused: the last event of run "
                f"{request.run_id!r} is {book.journal.last_event}; give at most that",
                field="after_event",
            )
        events = _responses(book, request.after_event, request.include_rollouts)

        def heartbeat() -> pb.WatchRunResponse:
            return pb.WatchRunResponse(heartbeat=Heartbeat(in_flight=book.state.ledger.in_flight))

        # A follower loses nothing by calling again, so it does not hold up a drain.
        watched = with_heartbeats(events, heartbeat, until=self._health.draining)
        async with aclosing(watched) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    async def StreamRollouts(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.StreamRolloutsResponse]:
        # A client loses nothing by calling again, so it does not hold up a drain.
        groups = with_heartbeats(
            self._groups(request_iterator),
            lambda: pb.StreamRolloutsResponse(heartbeat=Heartbeat()),
            until=self._health.draining,
        )
        async with aclosing(groups) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    async def _groups(
        self, requests: AsyncIterator[pb.StreamRolloutsRequest]
    ) -> AsyncGenerator[pb.StreamRolloutsResponse, None]:
        try:
            async with asyncio.timeout(START_S):
                first = await anext(requests, pb.StreamRolloutsRequest())
        except TimeoutError:
            first = pb.StreamRolloutsRequest()
        if first.WhichOneof("frame") != "start":
            raise refused("frame", first.WhichOneof("frame") or "", "begin with start, which names the run")
        stream = self._runs.rollout_stream(first.start.run_id)
        if stream is None:
            return
        async with aclosing(stream.responses(requests)) as responses:
            async for response in responses:
                yield response

    async def Evaluate(self, request: pb.EvaluateRequest, context: Any) -> AsyncIterator[pb.EvaluateResponse]:
        evaluation = self._runs.evaluation(request.run_id, request.config_toml)

        def heartbeat() -> pb.EvaluateResponse:
            return pb.EvaluateResponse(heartbeat=Heartbeat(in_flight=evaluation.lacking))

        # Nothing of it is kept, so there is nothing to lose that a drain would have to wait for.
        told = with_heartbeats(evaluation.responses(), heartbeat, until=self._health.draining)
        async with aclosing(told) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    async def FetchRunModel(
        self, request: pb.FetchRunModelRequest, context: Any
    ) -> AsyncIterator[pb.FetchRunModelResponse]:
        frames = handed_on(self._runs.keeper_of(request.run_id), request)

        def heartbeat() -> pb.FetchRunModelResponse:
            return pb.FetchRunModelResponse(heartbeat=Heartbeat())

        # A client loses nothing by calling again, so it does not hold up a drain.
        told = with_heartbeats(frames, heartbeat, until=self._health.draining)
        async with aclosing(told) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response


async def _responses(book: Book, after: int, rollouts: bool) -> AsyncGenerator[pb.WatchRunResponse, None]:
    async with aclosing(book.events(after, rollouts=rollouts)) as records:
        try:
            async for record in records:
                yield to_response(record)
        except JournalCorrupt as error:
            raise QuartetError("CHECKSUM_MISMATCH", str(error), run_id=book.state.run_id) from error
        except OSError as error:
            raise QuartetError(
                "NOT_READY", f"the journal cannot be read now: {error}", run_id=book.state.run_id
            ) from error


def listing(runs: Iterable[pb.Run]) -> pb.ListRunsResponse:
    """As many runs as fit into one message, without their configurations (GetRunStatus has them)."""
    response, size = pb.ListRunsResponse(), 0
    for run in runs:
        run.ClearField("config_toml")
        size += run.ByteSize() + LISTING_OVERHEAD_BYTES
        if size > LISTING_BYTES:
            break
        response.runs.append(run)
    return response


def to_response(record: JournalRecord) -> pb.WatchRunResponse:
    """An event as WatchRun tells it. The record has to be one."""
    response = pb.WatchRunResponse(event=record.event, at_ms=record.at_ms)
    match record.WhichOneof("kind"):
        case "phase":
            response.phase.CopyFrom(record.phase)
        case "step":
            response.step.CopyFrom(record.step)
        case "eval":
            response.eval.CopyFrom(record.eval)
        case "note":
            response.note.CopyFrom(record.note)
        case "rollout":
            response.rollout.CopyFrom(record.rollout)
        case "changed":
            response.note.CopyFrom(record.changed.note)
        case "met":
            response.note.CopyFrom(record.met.note)
        case "eval_rollout":
            response.rollout.CopyFrom(record.eval_rollout.rollout)
        case kind:
            raise AssertionError(f"{kind} is not an event")
    return response
