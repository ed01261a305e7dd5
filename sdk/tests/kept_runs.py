"""A small orchestrator that keeps runs in a dict."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import xxhash
from quartet.errors import QuartetError
from quartet.exported.manifest import digest_of
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.model_pb2 import ModelChunk, ModelFile, ModelManifest

MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Runs that never run."""

    def __init__(self) -> None:
        self.runs: dict[str, pb.Run] = {}
        self.evaluated: list[dict[str, object]] = []
        # Of every run, before the phase that it is in.
        self.past: list[pb.RunPhase] = []
        # Of a stop: how often it is looked at.
        self.looks = 0
        self.services: list[pb.ServiceStatus] = []
        self.knows_services = True
        # Of FetchRunModel: what was asked, and after how many frames each call breaks off.
        self.fetched: list[pb.FetchRunModelRequest] = []
        self.breaks_after: list[int] = []

    def _run(self, run_id: str) -> pb.Run:
        if run_id not in self.runs:
            raise QuartetError("RUN_UNKNOWN", f"no run {run_id!r}", run_id=run_id)
        return self.runs[run_id]

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        run = pb.Run(run_id=request.run_id, phase=pb.RUN_PHASE_PENDING, config_toml=request.config_toml)
        run.max_steps = parse_run(request.config_toml).max_steps
        if request.run_id == "taken":
            raise QuartetError("RUN_CONFLICT", "run 'taken' exists otherwise; choose another run_id")
        if not request.dry_run:
            run = self.runs.setdefault(request.run_id, run)
        return pb.SubmitRunResponse(run=run)

    async def ListRuns(self, request: pb.ListRunsRequest, context: object) -> pb.ListRunsResponse:
        if request.services and not self.knows_services:
            raise QuartetError(
                "NOT_IMPLEMENTED", "ListRunsRequest, field 1, which this release does not know"
            )
        return pb.ListRunsResponse(
            runs=self.runs.values(), services=self.services if request.services else []
        )

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        run = self._run(request.run_id)
        if run.phase == pb.RUN_PHASE_STOPPING:
            self.looks += 1
            run.doing = f"saving for {self.looks} s"
        status = pb.GetRunStatusResponse(run=run)
        if self.looks == 2 and run.phase == pb.RUN_PHASE_STOPPING:
            run.phase = pb.RUN_PHASE_STOPPED  # somebody has seen it, twice
        return status

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        run = self._run(request.run_id)
        run.phase, run.last_event = pb.RUN_PHASE_STOPPED, 1
        return pb.StopRunResponse(run=run)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: object) -> pb.ResumeRunResponse:
        run = self._run(request.run_id)
        if run.phase == pb.RUN_PHASE_STOPPING:
            raise QuartetError("INVALID_REQUEST", f"run {run.run_id!r} is STOPPING")
        run.phase = pb.RUN_PHASE_COMPLETED
        return pb.ResumeRunResponse(run=run)

    async def Evaluate(
        self, request: pb.EvaluateRequest, context: object
    ) -> AsyncIterator[pb.EvaluateResponse]:
        self._run(request.run_id)
        self.evaluated.append(tomllib.loads(request.config_toml))
        yield pb.EvaluateResponse(rollout=pb.RolloutEvent(env_id="reverse-text"))
        yield pb.EvaluateResponse(heartbeat=Heartbeat())
        coverage = 1.0 if len(self.evaluated) == 1 else 0.5
        metrics = {"eval/reward": 0.25, "eval/coverage": coverage}
        yield pb.EvaluateResponse(result=pb.EvalEvent(step=3, policy_version=3, metrics=metrics))

    async def FetchRunModel(
        self, request: pb.FetchRunModelRequest, context: object
    ) -> AsyncIterator[pb.FetchRunModelResponse]:
        self._run(request.run_id)
        self.fetched.append(request)
        files = [
            ModelFile(path=path, size_bytes=len(data), digest=xxhash.xxh3_128_digest(data))
            for path, data in MODEL.items()
        ]
        manifest = ModelManifest(
            run_id=request.run_id, state="final", policy_version=7, files=files, digest=digest_of(files)
        )
        frames = [pb.FetchRunModelResponse(manifest=manifest)]
        for path, data in MODEL.items():
            if path >= request.resume.path:
                chunk = ModelChunk(path=path, data=data, checksum=xxhash.xxh3_64_intdigest(data))
                frames.append(pb.FetchRunModelResponse(chunk=chunk))
        until = self.breaks_after.pop(0) if self.breaks_after else len(frames)
        for frame in frames[:until]:
            yield frame
        if until < len(frames):
            raise QuartetError("NOT_READY", "the trainer was killed")

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        run = self._run(request.run_id)
        for number, phase in enumerate(self.past, start=1):
            before = pb.Run(run_id=run.run_id, phase=phase)
            if number > request.after_event:
                yield pb.WatchRunResponse(event=number, phase=pb.PhaseEvent(run=before))
        yield pb.WatchRunResponse(event=len(self.past) + 1, phase=pb.PhaseEvent(run=run))


@asynccontextmanager
async def serving(servicer: Orchestrator, config: ServerConfig | None = None) -> AsyncIterator[str]:
    """Its address, while it serves."""
    service = Service(
        "quartet.v1.OrchestratorService", rpc.add_OrchestratorServiceServicer_to_server, servicer
    )
    server = await start([service], config or ServerConfig(), Health())
    yield server.address
    await server.stop(0)
