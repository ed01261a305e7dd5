"""The four real services as processes, and a way to call any RPC of the contract by its descriptor."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tests.forked_services import Forks, Process

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS_PYTHON = REPOSITORY / ".venv-envs/bin/python"
START_SECONDS = 120  # importing torch twice on a loaded machine
CALL_SECONDS = 30  # several times the 5 s after which an idle stream shows a sign of life

# What each process serves.
SERVED = {
    "trainer": ("trainer_service.TrainerService", "weights.WeightService"),
    "inference": ("inference_service.InferenceService", "weights.WeightService"),
    "envhost": ("envhost_service.EnvHostService",),
    "orchestrator": ("orchestrator_service.OrchestratorService",),
}


def methods_of(process: str) -> list[MethodDescriptor]:
    """Every RPC that a process must serve."""
    found = []
    for name in SERVED[process]:
        module, service = name.split(".")
        descriptor = import_module(f"quartet.v1.{module}_pb2").DESCRIPTOR.services_by_name[service]
        found += list(descriptor.methods)
    return found


@dataclass(frozen=True)
class Outcome:
    """How a call ended: OK (reason empty), or an error with what its status carried."""

    code: grpc.StatusCode
    details: str = ""
    infos: tuple[error_details_pb2.ErrorInfo, ...] = ()

    @property
    def reason(self) -> str:
        """The ErrorReason's name; empty where there is none."""
        return self.infos[0].reason if len(self.infos) == 1 else ""


def outcome_of(error: grpc.RpcError) -> Outcome:
    """Unpack a failed call."""
    status = rpc_status.from_call(error)
    infos = []
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            infos.append(info)
    return Outcome(error.code(), error.details() or "", tuple(infos))


@dataclass
class Deployed:
    """A running process."""

    name: str
    address: str
    process: Process
    log_file: Path
    channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])

    def call(self, method: MethodDescriptor, body: bytes = b"") -> Outcome:
        """Send one message of these bytes (nothing: an empty request) and close; the first answer decides."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        sides = (method.client_streaming, method.server_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        answer_class = GetMessageClass(method.output_type)
        multi = getattr(self.channel, kind)(path, bytes, answer_class.FromString)
        request = iter([body]) if method.client_streaming else body
        try:
            answer = multi(request, timeout=CALL_SECONDS)
            if method.server_streaming:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            return outcome_of(error)
        return Outcome(grpc.StatusCode.OK)

    def alive(self) -> bool:
        """Whether the process runs and its liveness key says SERVING."""
        if self.process.poll() is not None:
            return False
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=CALL_SECONDS)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder with random weights: the contract asks for no skill."""
    import torch
    from quartet.cli.tiny.files import write_model_files
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("untrained")
    write_model_files(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def start(forks: Forks, name: str, folder: Path, *arguments: str) -> Deployed:
    """Start a service and wait until it has bound."""
    port_file, log_file = folder / f"{name}.port", folder / f"{name}.log"
    process = forks.start(name, ["--server.port_file", str(port_file), *arguments], log_file)
    deadline = time.monotonic() + START_SECONDS
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{name} did not start:\n{log_file.read_text()[-4000:]}")
        time.sleep(0.05)
    return Deployed(name, port_file.read_text().strip(), process, log_file)


@pytest.fixture(scope="session")
def deployed(
    untrained_model: Path, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> Iterator[dict[str, Deployed]]:
    """The four services, joined as in a run, without one."""
    folder = tmp_path_factory.mktemp("deployed")
    running: dict[str, Deployed] = {}
    try:
        running["trainer"] = start(forks, "trainer", folder, "--state_dir", str(folder / "trainer"))
        weights = running["trainer"].address
        model = ("--model", str(untrained_model))
        running["inference"] = start(forks, "inference", folder, *model, "--weights_address", weights)
        policy = f'["{running["inference"].address}"]'
        python = ("--python", str(ENVIRONMENTS_PYTHON))
        running["envhost"] = start(forks, "envhost", folder, "--inference_addresses", policy, *python)
        running["orchestrator"] = start(
            forks,
            "orchestrator",
            folder,
            *("--data_dir", str(folder / "orchestrator"), "--trainer_address", weights),
            *("--envhost_addresses", f'["{running["envhost"].address}"]', "--inference_addresses", policy),
        )
        yield running
    finally:
        for one in running.values():
            one.channel.close()
            one.process.send_signal(signal.SIGTERM)
        for one in running.values():
            try:
                one.process.wait(30)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


@pytest.fixture(scope="session", name="methods_of")
def methods_of_fixture() -> Callable[[str], list[MethodDescriptor]]:
    """Every RPC that a process must serve."""
    return methods_of
