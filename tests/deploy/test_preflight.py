"""What a service's start would refuse is refused by its `--preflight`, and so by the local launcher, while
nothing runs yet and nothing was made; `--dry-run` looks at the configuration alone.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.tiny.files import write_model_files
from quartet.config import ConfigError
from quartet.local.deployment import check, write
from quartet.local.wiring import wire

from tests.deploy.programs import Services

REQUIRED = {
    "trainer": (),
    "inference": ("--model", "{tmp}/model"),
    "envhost": ("--inference_addresses", '["127.0.0.1:1"]'),
    "orchestrator": ("--trainer_address", "127.0.0.1:1", "--envhost_addresses", '["127.0.0.1:1"]'),
}
CLOSED = (
    "--server.address",
    "0.0.0.0:0",
    "--server.tls.cert_file",
    "/none",
    "--server.tls.key_file",
    "/none",
)
OF_ALL = [
    (("--server.token_file", "/none"), "server.token_file = '/none' cannot be read: No such file"),
    (("--server.address", "0.0.0.0:0"), "server.address = '0.0.0.0:0' is off loopback and plaintext; set"),
    ((*CLOSED, "--server.insecure_ok_off_loopback"), "server.tls.cert_file = '/none' cannot be read"),
    (("--server.address", "{busy}"), "server.address = '{busy}' cannot be bound: the port is in use; stop"),
    (("--server.metrics_address", "{busy}"), "server.metrics_address = '{busy}' cannot be bound"),
    (("--server.port_file", "/none/port"), "server.port_file = '/none/port' is in no folder; make it"),
]
OF_ONE = [
    ("trainer", ("--state_dir", "/proc/x"), "state_dir = '/proc/x' cannot be used: /proc takes no files"),
    ("trainer", ("--liger", "on", "--device", "cpu"), 'liger = "on", but the trainer computes on a CPU'),
    (
        "trainer",
        ("--losses.soft", "no_such_module:soft"),
        "losses.soft = 'no_such_module:soft' cannot be imported",
    ),
    ("orchestrator", ("--advantages.a", "math:no_such"), "advantages.a = 'math:no_such' cannot be imported"),
    ("orchestrator", ("--data_dir", "/proc/x"), "data_dir = '/proc/x' cannot be used: /proc takes no files"),
    ("inference", ("--openai.address", "{busy}"), "openai.address = '{busy}' cannot be bound: the port is"),
    (
        "inference",
        ("--openai.address", "127.0.0.1:0", "--openai.api_key_file", "/none"),
        "openai.api_key_file = '/none' cannot be read",
    ),
    ("inference", ("--engine", "vllm"), f'engine = "vllm" needs vLLM, which {sys.executable} has not'),
]


#: An interpreter in which nobody installed the front's extra.
WITHOUT_AIOHTTP = """
import importlib.util, runpy, sys

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "aiohttp" else found(name, *rest)
runpy.run_module("quartet_inference", run_name="__main__")
"""


@pytest.mark.parametrize("flag", ["--preflight", ""])
def test_a_front_whose_library_is_missing_is_told_before_anything_is_loaded(
    places: dict[str, str], flag: str
) -> None:
    arguments = [
        "--model",
        places["tmp"] + "/model",
        "--openai.address",
        "127.0.0.1:0",
        "--log_level",
        "error",
    ]
    command = [sys.executable, "-c", WITHOUT_AIOHTTP, *arguments, *filter(None, [flag])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install ./sdk './services/inference[openai]'" in done.stderr
    assert done.stderr.startswith(
        "error: openai.address = '127.0.0.1:0' needs aiohttp, which is not installed"
    )


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder with a model in it, and an address that is in use."""
    write_model_files(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"tmp": str(tmp_path), "busy": f"127.0.0.1:{taken.getsockname()[1]}"}


def run(
    services: Services, name: str, arguments: tuple[str, ...], flag: str, places: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    filled = [one.format(**places) for one in (*REQUIRED[name], *arguments)]
    return services.run(name, [*filled, flag], Path(places["tmp"]))


def refused(
    services: Services, name: str, arguments: tuple[str, ...], says: str, places: dict[str, str]
) -> None:
    done = run(services, name, arguments, "--preflight", places)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"error: {says.format(**places)}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert run(services, name, arguments, "--dry-run", places).returncode == 0


@pytest.mark.parametrize(("arguments", "says"), OF_ALL)
def test_what_no_service_can_do_here_is_refused(
    services: Services, places: dict[str, str], arguments: tuple[str, ...], says: str
) -> None:
    refused(services, "trainer", arguments, says, places)


@pytest.mark.parametrize(("name", "arguments", "says"), OF_ONE)
def test_what_one_service_cannot_do_here_is_refused(
    services: Services, places: dict[str, str], name: str, arguments: tuple[str, ...], says: str
) -> None:
    refused(services, name, arguments, says, places)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_preflight_looks_at_the_server_and_makes_nothing(
    services: Services, places: dict[str, str], name: str
) -> None:
    assert run(services, name, ("--server.token_file", "/none"), "--preflight", places).returncode == 2
    done = run(services, name, ("--server.metrics_address", "127.0.0.1:0"), "--preflight", places)
    assert (done.returncode, done.stderr) == (0, "")
    assert [one.name for one in Path(places["tmp"]).iterdir()] == ["model"]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_service_that_is_started_tells_a_taken_port_before_it_loads_anything(
    places: dict[str, str], name: str
) -> None:
    """quartet.config.main 3. Its own imports, torch among them, take seconds, and a model minutes."""
    for key in ("address", "metrics_address"):
        filled = [one.format(**places) for one in REQUIRED[name]]
        command = [
            *(sys.executable, "-X", "importtime", "-m", f"quartet_{name}", *filled),
            *(f"--server.{key}", places["busy"]),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=places["tmp"])
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and last.startswith(f"error: server.{key} = '{places['busy']}' cannot be")
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert not imported & {"torch", "transformers", "verifiers"} and "grpc" in imported


async def test_the_launcher_refuses_before_anything_starts(places: dict[str, str], tmp_path: Path) -> None:
    for name, table, says in (
        ("trainer", {"server": {"token_file": "/none"}}, r"^\[trainer\] server.token_file = '/none'"),
        ("trainer", {"state_dir": "/proc/x"}, r"^\[trainer\] state_dir = '/proc/x'"),
        ("inference", {"openai": {"address": places["busy"]}}, r"^\[inference\] openai.address = "),
    ):
        tables: dict[str, dict[str, Any]] = {one: {} for one in REQUIRED} | {name: table}
        specs = write(wire(f"{tmp_path}/model", tmp_path / "data", tables), tmp_path)
        with pytest.raises(ConfigError, match=says):
            await check(specs)
