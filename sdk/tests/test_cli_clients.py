"""The thin clients, as processes, against a small orchestrator that keeps runs in a dict."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from certificates import needs_openssl
from quartet.cli import clients
from quartet.cli.__main__ import main
from quartet.errors import QuartetError
from quartet.exported.manifest import digest_of
from quartet.kit.build import Build, build_of
from quartet.kit.health import Health
from quartet.kit.security import ServerTls
from quartet.kit.server import ServerConfig, Service, start
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.model_pb2 import ModelChunk, ModelFile, ModelManifest

MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}
RUN_TOML = 'model = "m"\nmax_steps = 3\n[[env]]\nid = "reverse-text"\n[trainer]\nstate_dir = "elsewhere"\n'


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Runs that never run."""

    def __init__(self) -> None:
        self.runs: dict[str, pb.Run] = {}
        self.evaluated: list[dict[str, object]] = []
        # Of every run, before the phase that it is in.
        self.past: list[pb.RunPhase] = []
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
            self.runs[request.run_id] = run
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
        return pb.GetRunStatusResponse(run=self._run(request.run_id))

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        run = self._run(request.run_id)
        run.phase, run.last_event = pb.RUN_PHASE_STOPPED, 1
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


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, str]]:
    servicer = Orchestrator()
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start([Service("quartet.v1.OrchestratorService", add, servicer)], ServerConfig(), Health())
    yield servicer, server.address
    await server.stop(0)


async def quartet(*arguments: str, **variables: object) -> tuple[int, str]:
    """Exit code and everything printed, with these variables in the environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quartet.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_a_run_through_all_clients(orchestrator: tuple[Orchestrator, str], tmp_path: Path) -> None:
    servicer, address = orchestrator
    config = tmp_path / "run.toml"
    config.write_text(RUN_TOML)
    at = ["--orchestrator", address]
    told = await quartet("submit", "@", str(config), *at, "--dry-run", "--run-id", "r")
    note = "not read, the services are running already: [trainer]\n"
    assert told == (0, f"{note}r would be accepted; not submitted\n")
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "taken")
    assert code == 2 and "exists otherwise; choose another --run-id" in printed, "as it is called here"
    assert servicer.runs == {}
    assert await quartet("runs", *at) == (0, "no run was submitted there yet\n")
    code, printed = await quartet("submit", "@", str(config), "--max-steps", "5", *at, "--run-id", "r")
    assert (code, printed) == (0, f"{note}r  pending  step 0/5\n")
    code, printed = await quartet("submit", "@", str(config), "--trainer.threads", "2", *at)
    assert code == 2 and "--trainer.threads is a setting of the trainer service" in printed
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "")
    assert code == 2 and printed.startswith("error: --run-id '' is refused"), "a shell's variable, unset"
    assert "state_dir" not in servicer.runs["r"].config_toml, "the deployment is not the orchestrator's"
    assert await quartet("runs", *at) == (0, "r  pending  step 0/5\n")
    assert await quartet("stop", "r", *at) == (0, "r  stopped  step 0/5\n")
    code, printed = await quartet("watch", "r", *at)
    assert code == 130 and printed.endswith("run r: stopped\n")
    servicer.runs["r"].error = "the trainer has been away for 600 s"
    code, printed = await quartet("watch", "r", *at)
    assert code == 1 and printed.endswith("stopped: the trainer has been away for 600 s\n"), "by itself"
    servicer.runs["r"].error = ""
    assert await quartet("resume", "r", *at) == (0, "r  completed  step 0/5\n")
    assert (await quartet("watch", "r", *at))[0] == 0


async def test_plaintext_leaves_this_machine_only_where_that_is_said(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    # Not loopback to whoever reads it, and to the kernel this machine.
    at = ["--orchestrator", orchestrator[1].replace("127.0.0.1", "0.0.0.0")]
    code, said = await quartet("runs", *at)
    assert code == 2 and "--insecure-ok-off-loopback on a private network" in said
    assert (await quartet("runs", *at, "--insecure-ok-off-loopback"))[0] == 0


async def test_who_watches_leaves_with_whoever_reads(orchestrator: tuple[Orchestrator, str]) -> None:
    """`quartet watch RUN | head`, of a run that goes on."""
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_TRAINING)
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quartet.cli", "watch", "r", "--orchestrator", address,
        stdout=writer, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(writer)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, said) == (1, b"")


async def test_a_run_that_was_stopped_once_is_watched_to_its_end(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    """Its old end is history, also where it has ended for good since."""
    servicer, address = orchestrator
    servicer.past = [pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_TRAINING]
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_COMPLETED, last_event=4)
    code, printed = await quartet("watch", "r", "--orchestrator", address)
    assert code == 0 and printed.endswith("run r: completed\n"), printed
    assert printed.index("run r: stopped") < printed.index("run r: completed")


async def test_a_file_of_vf_rl_is_submitted_as_the_run_that_it_is(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    file = tmp_path / "theirs.toml"
    file.write_text(
        'model = "m"\n[env]\nid = "owner/e"\n[inference]\ngpus = 2\n'
        "[trainer]\ngpus = 1\n[trainer.args]\nmax_steps = 7\n"
    )
    options = ["--trainer.args.batch_size", "64", "--orchestrator", address, "--run-id", "r"]
    code, printed = await quartet("submit", "@", str(file), *options)
    assert code == 0 and printed.endswith("r  pending  step 0/7\n")
    assert "theirs.toml: read as vf-rl" in printed
    assert "inference.gpus" not in printed, "nobody here knows the engine there"
    assert "not read, the services are running already: [trainer], [inference]" in printed
    run = parse_run(servicer.runs["r"].config_toml)
    assert (run.batch_size, run.rollouts_per_example, run.algorithm.proximal) == (64, 16, True)
    assert run.trainer == run.inference == {}


async def test_where_a_run_is_shown_goes_along_for_who_watches(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    config, at = tmp_path / "run.toml", ["--orchestrator", address]
    config.write_text(RUN_TOML)
    assert (await quartet("submit", "@", str(config), *at, "--run-id", "plain"))[0] == 0
    assert "wandb" not in servicer.runs["plain"].config_toml
    shown = ["submit", "@", str(config), *at, "--wandb.project", "theirs", "--run-id", "shown"]
    assert (await quartet(*shown))[0] == 0
    assert parse_run(servicer.runs["shown"].config_toml).wandb.project == "theirs"
    code, printed = await quartet("watch", "plain", *at, "--wandb")
    assert code == 2 and "names no project of Weights & Biases; add --wandb.project NAME" in printed
    code, printed = await quartet("watch", "shown", *at, "--wandb", "--after-event", "3")
    assert code == 2 and "--after-event leaves out events, and the folder is to have all" in printed
    code, printed = await quartet("watch", "shown", *at, "--wandb.projekt", "p")
    assert code == 2 and "did you mean 'wandb.project'" in printed


async def test_a_run_is_recorded_where_it_is_watched(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    for run_id in ("r", "other"):
        servicer.runs[run_id] = pb.Run(run_id=run_id, phase=pb.RUN_PHASE_COMPLETED, last_event=1)
    folder = tmp_path / "there"
    watch = ["--orchestrator", address, "--output-dir", str(folder)]
    for _ in range(2):
        code, printed = await quartet("watch", "r", *watch)
        assert code == 0 and f"run r is recorded in {folder}" in printed
    assert {file.name for file in folder.iterdir()} == {".lock", "rollouts", "watched.json"}
    for slip in ("--tensorbord", "--tensorbord=true"):
        code, printed = await quartet("watch", "r", *watch, slip)
        assert code == 2 and "did you mean '--tensorboard'?" in printed, "a flag, of a table's name"
    code, printed = await quartet("watch", "r", *watch, "--tensorboard")
    assert code == 0 and f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}" in printed
    assert [file.name[:20] for file in (folder / "tensorboard").iterdir()] == ["events.out.tfevents."]
    code, printed = await quartet("watch", "other", *watch)
    assert code == 2 and "holds something else than the run 'other'" in printed
    code, printed = await quartet("watch", "r", "--orchestrator", address, "--keep-rollouts", "3")
    assert code == 2 and "--keep-rollouts is about what --output-dir records" in printed
    code, printed = await quartet("watch", "r", *watch, "--keep-rollouts", "0")
    assert code == 2 and "give a number of steps from 1 on" in printed
    assert (await quartet("watch", "r", *watch, "--keep-rollouts", "3"))[0] == 0


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


async def test_an_evaluation_takes_the_short_flags_of_eval(orchestrator: tuple[Orchestrator, str]) -> None:
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r")
    short = ["-n", "4", "-r", "2", "-c", "8", "-t", "9", "-T", "0"]
    code, printed = await quartet("evaluate", "r", *short, "--orchestrator", address)
    assert code == 0, printed
    sampling = {"max_tokens": 9, "temperature": 0.0}
    assert servicer.evaluated == [
        {"num_examples": 4, "rollouts_per_example": 2, "max_concurrent": 8, "sampling": sampling}
    ]
    code, printed = await quartet("evaluate", "r", "-n", "-1", "--orchestrator", address)
    assert code == 2 and "num_examples = -1 is refused" in printed


async def test_runs_tells_what_they_do_and_which_services_to_see_to(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    servicer, address = orchestrator
    at = ["--orchestrator", address]
    doing = "training step 3 for 9 s; the trainer is away"
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_TRAINING, step=2, max_steps=5, doing=doing)
    line, here = f"r  training  step 2/5  {doing}\n", build_of()
    same: dict[str, Any] = {"release": here.release, "sdk_build": here.sdk, "ready": True}
    servicer.services = [
        pb.ServiceStatus(service="orchestrator", build="o", **same),
        pb.ServiceStatus(service="inference", address="h:1", build="i", **same),
        pb.ServiceStatus(service="inference", address="h:2", build="i", **same),
    ]
    assert await quartet("runs", *at) == (0, line), "nothing where nothing is to be said"
    servicer.runs["r"].environments.add(id="toy", version="1.0", digest="aaaa", later_digests=["bbbb"])
    of_it = "  environment toy  version 1.0  digest aaaa -> bbbb\n"
    assert await quartet("runs", *at, "--environments") == (0, line + of_it)
    code, printed = await quartet("runs", *at, "--services")
    assert printed == line + "".join(
        f"{name}: ready, {Build(here.release, here.sdk, own)}\n"
        for name, own in (("orchestrator", "o"), ("inference at h:1", "i"), ("inference at h:2", "i"))
    )
    servicer.services[2].build, servicer.services[1].ready = "older", False
    assert "inference at h:1: not ready, its log says why" in (await quartet("runs", *at, "--services"))[1]
    servicer.runs["r"].phase = pb.RUN_PHASE_COMPLETED
    assert "inference at h:1: idle, serves from a run's f" in (await quartet("runs", *at, "--services"))[1]
    servicer.runs["r"].phase = pb.RUN_PHASE_TRAINING
    servicer.services.append(pb.ServiceStatus(service="trainer", address="h:3", error="Connection refused"))
    code, printed = await quartet("runs", *at)
    assert code == 0 and line in printed
    assert "trainer at h:3 does not answer: Connection refused\n" in printed
    assert (
        f"builds differ: this command {here}, orchestrator {here.release} (sdk {here.sdk}, own o)" in printed
    )
    assert f"inference {here.release} (sdk {here.sdk}, own older)\n" in printed
    servicer.knows_services = False
    assert await quartet("runs", *at) == (0, line), "of an orchestrator of an earlier release"


async def test_a_model_that_is_elsewhere_is_fetched(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    """export.py 4."""
    servicer, address = orchestrator
    at, target = ["--orchestrator", address], tmp_path / "models" / "mine"
    code, printed = await quartet("export", "r", str(target), *at)
    assert (code, printed) == (1, "error: RUN_UNKNOWN: no run 'r'\n")
    servicer.runs["r"], servicer.breaks_after = pb.Run(run_id="r"), [2]
    what = "the model of state final, policy version 7: 2 files, 0.0 MB"
    torn = "broken off, goes on from byte 0 of model.safetensors: the trainer was killed"
    code, printed = await quartet("export", "r", str(target), *at, "--state", "final", "--adapter")
    assert (code, printed) == (0, f"fetching {what}\n{torn}\n{target}: {what}\n")
    assert {file.name: file.read_bytes() for file in target.iterdir()} == MODEL
    assert [(one.state, one.adapter, one.resume.path) for one in servicer.fetched] == [
        ("final", True, ""),
        ("final", True, "model.safetensors"),
    ]
    code, printed = await quartet("export", "r", str(target), *at)
    assert code == 2 and "it exists and is no empty folder; name one that does not" in printed
    assert len(servicer.fetched) == 2


async def test_the_environment_may_say_where_the_orchestrator_is(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    """variables.py 1 and 2."""
    _, address = orchestrator
    nothing = (0, "no run was submitted there yet\n")
    assert await quartet("runs", QUARTET_ORCHESTRATOR=address) == nothing
    other = {"QUARTET_ORCHESTRATOR": "10.0.0.5:1", "QUARTET_TOKEN_FILE": tmp_path / "absent"}
    assert await quartet("runs", "--orchestrator", address, **other) == nothing, "a token of another one"


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        ([], {"ORCHESTRATOR": ""}, "give --orchestrator HOST:PORT, or set QUARTET_ORCHESTRATOR to it"),
        ([], {"ORCHESTRATOR": "10.0.0.5:1"}, "QUARTET_ORCHESTRATOR: address '10.0.0.5:1' is off loopback"),
        (["--orchestrator", "127.0.0.1:1"], {"KEY_FILE": "k"}, "cert_file and QUARTET_KEY_FILE go together"),
        (["--orchestrator", "127.0.0.1:1"], {"TOKEN_FILE": "/absent"}, "error: QUARTET_TOKEN_FILE"),
        (
            [],
            {"ORCHESTRATOR": "127.0.0.1:1", "TOKEN_FILE": "/absent/orchestrator/token_file"},
            "error: QUARTET_TOKEN_FILE = '/absent/orchestrator/token_file'",
        ),
    ],
)
def test_what_is_wrong_with_a_variable_is_told_by_its_name(
    arguments: list[str],
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """variables.py 3."""
    for name, value in variables.items():
        monkeypatch.setenv(f"QUARTET_{name}", value)
    assert main(["runs", *arguments]) == 2
    assert told in capsys.readouterr().err


async def test_errors_are_one_sentence(orchestrator: tuple[Orchestrator, str]) -> None:
    _, address = orchestrator
    assert await quartet("stop", "x", "--orchestrator", address) == (1, "error: RUN_UNKNOWN: no run 'x'\n")
    code, printed = await quartet("runs", "--orchestrator", address, "stray")
    assert code == 2 and "'stray' is not understood" in printed


class Slow(Orchestrator):
    """Takes a call, and does not come to its end."""

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        await asyncio.sleep(60)
        return pb.StopRunResponse()


async def test_a_slow_orchestrator_is_no_failed_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """unreachable.py 2: it took the connection, and the call."""
    monkeypatch.setattr(clients, "CALL_SECONDS", 0.5)
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start([Service("quartet.v1.OrchestratorService", add, Slow())], ServerConfig(), Health())
    parser = argparse.ArgumentParser()
    clients.add_arguments(parser, takes_run=True)
    stop = parser.parse_args(["r", "--orchestrator", server.address])
    with pytest.raises(QuartetError) as caught:
        await asyncio.to_thread(clients.run, clients.stop, stop, [])
    assert caught.value.reason == "DEADLINE"
    assert caught.value.message.startswith(f"no orchestrator answers at {server.address} (")
    assert "handshake" not in caught.value.message and "--ca-file" not in caught.value.message
    await server.stop(0)


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
    assert await quartet("runs", *at, *own) == (0, "no run was submitted there yet\n")
    code, printed = await quartet("runs", *at)
    # Of the two addresses of localhost gRPC tells the error of either.
    assert code == 1 and "if it has TLS, give --cert-file and --key-file" in printed
    by_another_name = [at[0], at[1].replace("localhost", "127.0.0.1"), "--ca-file", str(pki / "other.crt")]
    code, printed = await quartet("runs", *by_another_name)
    assert code == 1 and "; give --ca-file the one that signed it" in printed
    code, printed = await quartet("runs", *at, *own[:2])
    assert code == 2 and "cert_file and key_file go together" in printed
    await server.stop(0)


@needs_openssl
async def test_tls_on_one_side_alone_is_told_with_what_to_write(
    pki: Path, orchestrator: tuple[Orchestrator, str]
) -> None:
    _, plain = orchestrator
    code, printed = await quartet("runs", "--orchestrator", plain, "--ca-file", str(pki / "ca.crt"))
    assert code == 1 and "it speaks plaintext, and was called with TLS" in printed
    assert "; leave --ca-file out" in printed
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key")
    add = rpc.add_OrchestratorServiceServicer_to_server
    offered = Service("quartet.v1.OrchestratorService", add, Orchestrator())
    (pki / "token").write_text("secret")
    config = ServerConfig(address="127.0.0.1:0", tls=tls, token_file=pki / "token")
    server = await start([offered], config, Health())
    code, printed = await quartet("runs", "--orchestrator", server.address)
    assert code == 1 and "if it has TLS, give --ca-file" in printed
    at = {"QUARTET_ORCHESTRATOR": server.address, "QUARTET_CA_FILE": pki / "ca.crt"}
    (pki / "other").write_text("another secret")
    code, printed = await quartet("runs", **at, QUARTET_TOKEN_FILE=pki / "other")
    assert code == 1 and "QUARTET_TOKEN_FILE of the environment)" in printed
    await server.stop(0)
