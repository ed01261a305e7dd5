"""The thin clients, as processes, against a small orchestrator that keeps runs in a dict."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import needs_openssl
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.security import ServerTls
from quartet.kit.server import ServerConfig, Service, start
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc
from quartet.v1.common_pb2 import Heartbeat

RUN_TOML = 'model = "m"\nmax_steps = 3\n[[env]]\nid = "reverse-text"\n[trainer]\nstate_dir = "elsewhere"\n'


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Runs that never run."""

    def __init__(self) -> None:
        self.runs: dict[str, pb.Run] = {}
        self.evaluated: list[dict[str, object]] = []

    def _run(self, run_id: str) -> pb.Run:
        if run_id not in self.runs:
            raise QuartetError("RUN_UNKNOWN", f"no run {run_id!r}", run_id=run_id)
        return self.runs[run_id]

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        run = pb.Run(run_id=request.run_id, phase=pb.RUN_PHASE_PENDING, config_toml=request.config_toml)
        run.max_steps = parse_run(request.config_toml).max_steps
        if not request.dry_run:
            self.runs[request.run_id] = run
        return pb.SubmitRunResponse(run=run)

    async def ListRuns(self, request: pb.ListRunsRequest, context: object) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=self.runs.values())

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        return pb.GetRunStatusResponse(run=self._run(request.run_id))

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        run = self._run(request.run_id)
        run.phase = pb.RUN_PHASE_STOPPED
        return pb.StopRunResponse(run=run)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: object) -> pb.ResumeRunResponse:
        run = self._run(request.run_id)
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

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        yield pb.WatchRunResponse(event=1, phase=pb.PhaseEvent(run=self._run(request.run_id)))


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, str]]:
    servicer = Orchestrator()
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start([Service("quartet.v1.OrchestratorService", add, servicer)], ServerConfig(), Health())
    yield servicer, server.address
    await server.stop(0)


async def quartet(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quartet.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_a_run_through_all_clients(orchestrator: tuple[Orchestrator, str], tmp_path: Path) -> None:
    servicer, address = orchestrator
    config = tmp_path / "run.toml"
    config.write_text(RUN_TOML)
    at = ["--orchestrator", address]
    assert (await quartet("submit", "@", str(config), *at, "--dry-run", "--run-id", "r"))[0] == 0
    assert servicer.runs == {}
    code, printed = await quartet("submit", "@", str(config), "--max-steps", "5", *at, "--run-id", "r")
    note = "not read, the services are running already: [trainer]\n"
    assert (code, printed) == (0, f"{note}r  pending  step 0/5\n")
    code, printed = await quartet("submit", "@", str(config), "--trainer.threads", "2", *at)
    assert code == 2 and "--trainer.threads is a setting of the trainer service" in printed
    assert "state_dir" not in servicer.runs["r"].config_toml, "the deployment is not the orchestrator's"
    assert await quartet("runs", *at) == (0, "r  pending  step 0/5\n")
    assert await quartet("stop", "r", *at) == (0, "r  stopped  step 0/5\n")
    code, printed = await quartet("watch", "r", *at)
    assert code == 1 and printed.endswith("run r: stopped\n")
    assert await quartet("resume", "r", *at) == (0, "r  completed  step 0/5\n")
    assert (await quartet("watch", "r", *at))[0] == 0


async def test_a_policy_is_measured_and_only_what_was_said_is_sent(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r")
    file = tmp_path / "evaluation.toml"
    file.write_text('num_examples = 8\n[sampling]\ntemperature = 0.0\n[[env]]\nid = "gsm8k"\n')
    asked = ["evaluate", "r", "@", str(file), "--rollouts-per-example", "2", "--orchestrator", address]
    code, printed = await quartet(*asked)
    assert (code, printed) == (0, "r  version 3, after step 3\neval/coverage  1\neval/reward  0.25\n")
    assert servicer.evaluated == [
        {
            "num_examples": 8,
            "rollouts_per_example": 2,
            "sampling": {"temperature": 0.0},
            "env": [{"id": "gsm8k"}],
        }
    ]
    assert (await quartet(*asked))[0] == 1, "something is missing"
    code, printed = await quartet(*asked, "--interval", "2")
    assert code == 2 and "interval" in printed and len(servicer.evaluated) == 2


async def test_errors_are_one_sentence(orchestrator: tuple[Orchestrator, str]) -> None:
    _, address = orchestrator
    assert await quartet("stop", "x", "--orchestrator", address) == (1, "error: RUN_UNKNOWN: no run 'x'\n")
    code, printed = await quartet("runs", "--orchestrator", address, "stray")
    assert code == 2 and "'stray' is not understood" in printed


@needs_openssl
async def test_an_orchestrator_that_asks_for_a_certificate_is_shown_one(pki: Path) -> None:
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key", client_ca_file=pki / "ca.crt")
    add = rpc.add_OrchestratorServiceServicer_to_server
    offered = Service("quartet.v1.OrchestratorService", add, Orchestrator())
    server = await start([offered], ServerConfig(address="127.0.0.1:0", tls=tls), Health())
    at = [
        "--orchestrator",
        server.address.replace("127.0.0.1", "localhost"),
        "--ca-file",
        str(pki / "ca.crt"),
    ]
    own = ["--cert-file", str(pki / "client.crt"), "--key-file", str(pki / "client.key")]
    assert await quartet("runs", *at, *own) == (0, "")
    code, printed = await quartet("runs", *at, *own[:2])
    assert code == 2 and "cert_file and key_file go together" in printed
    await server.stop(0)
