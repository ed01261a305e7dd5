"""On a machine that others use, too: the services of `quartet rl` know their own user, who types nothing for
it, and nobody else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of
from tests.faults.test_kill_each_service import steps_done, wait_for_steps
from tests.faults.test_launcher import services_of

pytestmark = pytest.mark.usefixtures("imported_once")

STEPS, SECONDS = 1000, 300  # it is stopped once it was looked at
NOBODY = 65534
SERVICES = ("trainer", "inference-1", "inference-2", "envhost", "orchestrator")

#: Calls each service as another user. Only root can become one; without it the user's folder is another.
STRANGER = """
import asyncio, json, os, pathlib, sys
from quartet.errors import QuartetError
from quartet.kit import launched
from quartet.kit.call import unary
from quartet.kit.channel import connect
from quartet.v1 import envhost_service_pb2 as e, inference_service_pb2 as i, orchestrator_service_pb2 as o
from quartet.v1 import trainer_service_pb2 as t
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
CALLS = {
    "trainer": (TrainerServiceStub, "GetRun", t.GetRunRequest(run_id="run")),
    "inference": (InferenceServiceStub, "GetModel", i.GetModelRequest()),
    "envhost": (EnvHostServiceStub, "ListEnvironments", e.ListEnvironmentsRequest()),
    "orchestrator": (OrchestratorServiceStub, "ListRuns", o.ListRunsRequest()),
}
token, nobody, served = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(nobody)
    try:
        print("token", open(token).read())
    except PermissionError:
        pass
else:
    launched.PARENT = pathlib.Path("/nonexistent")
async def main():
    for name, address in served.items():
        stub, call, request = CALLS[name.partition("-")[0]]
        async with connect(address) as channel:
            try:
                await unary(getattr(stub(channel), call), request, timeout_s=30)
                print(name, "OK")
            except QuartetError as error:
                print(name, error.reason)
asyncio.run(main())
"""


@pytest.fixture
def launched(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that goes on, and its folder, to which others have a way."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    output = tmp_path / "run"
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(tiny_model), "--plain"]
    command += ["--max-steps", str(STEPS), "--eval.num-examples", "4", "--output-dir", str(output)]
    command += ["--inference.replicas", "2", "--batch-size", "16"]
    with (tmp_path / "launcher.log").open("w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_steps(process, output, 1, SECONDS)
        yield process, output
    finally:
        process.kill()
        process.wait()
        print((tmp_path / "launcher.log").read_text()[-3000:])


def test_strangers_are_refused_by_every_service_and_the_user_types_nothing(
    launched: tuple[subprocess.Popen[str], Path],
) -> None:
    process, output = launched
    served = {name: (output / "data" / f"{name}.port").read_text().strip() for name in SERVICES}
    token = output / "data" / "token"

    def stranger() -> list[str]:
        command = [sys.executable, "-c", STRANGER, str(token), str(NOBODY), json.dumps(served)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    refused = [f"{name} UNAUTHENTICATED" for name in SERVICES]
    assert stranger() == refused
    runs = [*QUARTET, "runs", "--orchestrator", served["orchestrator"]]
    said = subprocess.run(runs, capture_output=True, text=True, check=False)
    assert said.returncode == 0 and said.stdout.startswith("run "), said.stderr

    port = output / "data" / "envhost.port"
    first = port.stat().st_mtime_ns
    config = f"{output}/config/envhost.toml".encode()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in services_of(output)}
    os.kill(next(pid for pid, line in lines.items() if config in line), signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    # Written once it listens, and removed before each start.
    while not port.exists() or port.stat().st_mtime_ns == first:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert stranger() == refused, "also after a restart"
    secret = token.read_text().strip()
    # With the same secret the run goes on, further than by what was under way already.
    wait_for_steps(process, output, steps_done(output) + 4, SECONDS)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    assert summary_of(output)["restarts"]["envhost"] == 1
    for log in [*(output / "logs").iterdir(), output.parent / "launcher.log"]:
        assert secret not in log.read_text(errors="replace"), log
    assert not any(secret.encode() in word for line in lines.values() for word in line)
