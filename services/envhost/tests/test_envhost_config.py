"""Configuration and interpreters: what is refused before anything starts, and in which words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosting import make_host
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost

ADDRESS = '["127.0.0.1:1"]'


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quartet_envhost", "--inference-addresses", ADDRESS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_dry_run_prints_the_resolved_configuration() -> None:
    done = run("--dry-run", "--python", sys.executable, "--workers", "3")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert config["workers"] == 3 and config["python"] == sys.executable


#: Runs the host's command again and again, as `python -m` does: what each ended with, and said.
COMMANDS = """
import contextlib, io, json, runpy, sys
for arguments in json.load(sys.stdin):
    sys.argv[1:] = arguments
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module("quartet_envhost", run_name="__main__")
        except SystemExit as ended:
            print(json.dumps([ended.code, said.getvalue()]))
"""
REFUSED: list[tuple[list[str], str]] = [
    (["--python", "/nowhere/python"], "interpreter '/nowhere/python' does not exist"),
    (["--python", __file__], "is not executable"),
    (["--wrokers", "3"], "did you mean 'workers'?"),
    (["--inference-addresses", "[]"], "inference_addresses"),
    (["--interact-only", "true"], "or else set interact_only"),
    (["--inference-addresses", '["10.1.1.1:5"]'], "off loopback"),
    (["--inference-addresses", '["dns:///localhost"]'], "write dns:///name:port"),
    (["--inference-addresses", '["x"]'], "inference_addresses: address 'x' has no port"),
    (["--timeout-seconds", "inf"], "timeout_seconds = inf is refused"),
    (["--max-memory-gb", "inf"], "max_memory_gb = inf is refused"),
    (["--log-level", "loud"], "log_level = 'loud' is refused: should be 'debug', 'info', 'warning' or"),
    (["--preload", "[{ id = 'b', args = { since = 2026-11-22 } }]"], "preload.0.args.since"),
]


def test_bad_configuration_is_one_sentence() -> None:
    """Of one process, which imports what the command needs once."""
    base = ["--inference-addresses", ADDRESS, "--dry-run"]
    commands = json.dumps([[*base, *arguments] for arguments, _ in REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=commands,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, text), (code, said) in zip(REFUSED, ends, strict=True):
        assert code == 2 and text in said, (arguments, code, said)
        assert len(said.strip().splitlines()) == 1, said


def test_interpreter_of_one_environment_is_checked(tmp_path: Path) -> None:
    """config.py 1."""
    file = tmp_path / "envhost.toml"
    file.write_text('[environments."reverse-text"]\npython = "/nowhere/python"\n')
    done = run("--dry-run", "@", str(file))
    assert done.returncode == 2 and "/nowhere/python" in done.stderr


def test_settings_of_an_environment_fall_back_to_the_hosts() -> None:
    config = EnvHostConfig.model_validate(
        {
            "inference_addresses": ["127.0.0.1:1"],
            "workers": 2,
            "environments": {"reverse-text": {"rollouts_per_worker": 7}},
        }
    )
    found = config.environment("owner/Reverse_Text@1.0")
    assert found is not None
    assert (found.workers, found.rollouts_per_worker, found.python) == (2, 7, sys.executable)
    assert config.environment("other") is None
    open_host = EnvHostConfig(inference_addresses=["127.0.0.1:1"])
    assert open_host.environment("anything") is not None


async def test_a_host_without_inference_runs_no_rollouts_by_itself() -> None:
    host = EnvironmentHost(EnvHostConfig(interact_only=True))
    request = envhost_service_pb2.RunRolloutsRequest(environment={"id": "reverse-text"}, members=[0])
    with pytest.raises(QuartetError, match="use Interact") as caught:
        await anext(host.run(request))
    assert caught.value.reason == "INVALID_REQUEST"
    await host.close()


async def describe(python: str) -> QuartetError:
    host = EnvironmentHost(EnvHostConfig(inference_addresses=["127.0.0.1:1"], python=python))
    with pytest.raises(QuartetError) as caught:
        await host.describe(envhost_service_pb2.EnvironmentRef(id="reverse-text"))
    await host.close()
    return caught.value


async def test_interpreter_that_cannot_run_a_worker_is_named_with_the_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    error = await describe(str(python))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE" and "cannot run the worker" in error.message
    assert f"{python} -m pip install ./sdk './services/envhost[verifiers]'" in error.message


@pytest.mark.asyncio(loop_scope="session")
async def test_what_is_preloaded_has_its_workers_before_it_is_asked_for(
    envs_python: str, templates_of_all: Any, path: dict[str, Any]
) -> None:
    settings = {
        "interact_only": True,
        "python": envs_python,
        "preload": [{"id": "reverse-text"}],
        "environments": {"reverse-text": path},
    }
    host = make_host(settings, templates_of_all)
    try:
        await host.preload()
        (hosted,) = host.hosted()
        assert (hosted.id, hosted.workers) == ("reverse-text", 1)
        await host.describe(envhost_service_pb2.EnvironmentRef(id="owner/reverse-text", args_json="{}"))
        assert host.hosted() == [hosted], "the same workers"
    finally:
        await host.close()


async def test_what_cannot_be_preloaded_is_said_to_whoever_asks() -> None:
    """With the remedy. The interpreter of these tests has this package and no verifiers."""
    settings = {"interact_only": True, "preload": [{"id": "reverse-text"}]}
    host = EnvironmentHost(EnvHostConfig.model_validate(settings))
    await host.preload()
    with pytest.raises(QuartetError, match="has no verifiers") as caught:
        await host.describe(envhost_service_pb2.EnvironmentRef(id="reverse-text"))
    await host.close()
    assert caught.value.reason == "INVALID_CONFIG"
    remedy = f"{sys.executable} -m pip install ./sdk './services/envhost[verifiers]'"
    assert remedy in caught.value.message


async def test_interpreter_without_this_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    error = await describe(str(broken))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE"
    assert str(broken) in error.message and "install" in error.message


ANY_SPLIT = """
import verifiers.v1 as vf

__all__ = ["AnyTaskset"]
SPLITS = {"train": "ab", "train[:1]": "a", "hard": "c"}


class AnyTask(vf.Task):
    @property
    def key(self):
        return f"of {self.data.prompt}"


class AnyConfig(vf.TasksetConfig):
    split: str = "train"


class AnyTaskset(vf.Taskset[AnyTask, AnyConfig]):
    def load(self):
        split = self.config.split
        return [AnyTask(vf.TaskData(idx=0, prompt=split), self.config.task) for _ in SPLITS[split]]
"""


def test_arguments_packages_and_splits_in_the_environments_interpreter(
    envs_python: str, tmp_path: Path
) -> None:
    """v1/environment.py 2 and 3, v1/tasks.py 3 and 4: what a model says is executed where somebody has said;
    the split to evaluate with is the one that was named, or one that the taskset knows."""
    (tmp_path / "old_one.py").write_text("def load_environment():\n    pass\n")
    (tmp_path / "any_split.py").write_text(ANY_SPLIT)
    script = """
import gc; gc.disable()  # imports leave no garbage that counts
import asyncio, enum
from typing import Literal, Optional
from quartet.v1.envhost_service_pb2 import GetTasksRequest, SPLIT_EVAL
from quartet_envhost.v1.tasks import eval_split
from quartet.errors import QuartetError
from quartet_envhost.own_code import OwnCode
from quartet_envhost.v1.environment import HostedEnvironment, environment_config
shell = {"harness": {"id": "bash"}}
for env_id, args in [
    ("not-installed", {}),
    ("reverse-text", {"num_train": "many"}),
    ("reverse-text", {"min_chars": 9, "max_chars": 3}),
    ("reverse-text", {"texts": 5}),
    ("reverse-text", {"agent": {"max_turns": "x"}}),
    ("numpy", {}),
    ("json", {}),
    ("old-one", {}),
    ("reverse-text", {"agent": shell}),
    ("reverse-text", {"env": "user-sim", "assistant": {"harness": {"id": "null"}}, "user": shell}),
]:
    try:
        HostedEnvironment(env_id, args, OwnCode(env_id))
    except QuartetError as error:
        print(error)
config = environment_config("owner/reverse-text", {"agent": {"max_turns": 3}, "num_train": 9})
agent = config.agent
print(agent.max_turns, agent.harness.id, agent.runtime.type, config.taskset.num_train)
for agent in ({"harness": {"id": "null"}}, {**shell, "runtime": {"type": "subprocess"}}):
    HostedEnvironment("reverse-text", {"agent": agent, "num_train": 1}, OwnCode("reverse-text"))
for annotation in (
    Literal["train", "test"], Literal["train", "eval"] | None, Optional[Literal["train", "validation"]],
    str, str | None, Literal["easy", "hard"], Literal["easy"] | None,
    float, enum.Enum("Halves", "train dev"), enum.StrEnum("Thirds", "train validation"),
):
    print(eval_split(annotation))
for args in ({}, {"split": "train[:1]"}, {"split": "hard"}):
    hosted = HostedEnvironment("any-split", args, OwnCode("any-split"))
    info = asyncio.run(hosted.describe())
    print(info.train_size, info.eval_size, info.HasField("eval_size"))
    try:
        print(asyncio.run(hosted.tasks(GetTasksRequest(split=SPLIT_EVAL, count=9))).tasks[0].key)
    except QuartetError as error:
        print(error)
"""
    done = subprocess.run(
        [envs_python, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 27, done.stdout
    assert lines[0].startswith("ENVIRONMENT_UNKNOWN") and "install the package 'not-installed'" in lines[0]
    assert lines[1].startswith("INVALID_CONFIG") and "args.num_train" in lines[1]
    assert lines[2].startswith("INVALID_CONFIG") and "min_chars = 9 is more than max_chars = 3" in lines[2]
    assert lines[3].startswith("INVALID_CONFIG") and "args.texts" in lines[3]
    assert lines[4].startswith("INVALID_CONFIG") and "args.agent.max_turns" in lines[4]
    assert lines[5].startswith("INVALID_CONFIG") and lines[5].endswith("which class is its Taskset")
    assert "package 'numpy' is installed, and is no environment of verifiers 0.4: name another" in lines[5]
    assert "package 'json' is installed, and is no environment" in lines[6]
    said = "verifiers 0.4: it is one of classic Verifiers (it has load_env"
    assert f"INVALID_CONFIG: package 'old_one' is installed, and is no environment of {said}" in lines[7]
    for line, role in ((lines[8], "agent"), (lines[9], "user")):
        assert line.startswith("INVALID_CONFIG") and "harness 'bash' executes what the model says" in line
        assert f'args.{role}.runtime = {{ type = "docker" }}' in line and '{ type = "subprocess" } on' in line
    assert lines[10] == "3 quartet_in_process subprocess 9"
    assert lines[11:18] == ["test", "eval", "validation", "test", "None", "None", "None"]
    assert lines[18:21] == ["None", "None", "validation"]
    assert lines[21] == "2 0 False" and lines[23] == "1 0 False"
    for line in (lines[22], lines[24]):
        assert line.startswith("ENVIRONMENT_UNAVAILABLE: environment 'any-split' has no evaluation examples")
        assert "set to 'test' for them" in line and "in load: KeyError: 'test'" in line
        assert line.endswith("; args.split of [[eval.env]] names another")
    assert lines[25:] == ["1 1 True", "of hard"]


def test_sigterm_drains_and_exits_with_zero(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "quartet_envhost", "--inference-addresses", ADDRESS]
    with subprocess.Popen(
        [*command, "--server.port-file", str(port_file)], stderr=subprocess.DEVNULL
    ) as host:
        _wait(port_file.exists)
        host.send_signal(signal.SIGTERM)
        assert host.wait(timeout=60) == 0


def test_workers_die_with_a_killed_front() -> None:
    """process.py 2, worker.py 1."""
    script = """
import asyncio, sys
from quartet_envhost.process import WorkerProcess
async def main():
    worker = await WorkerProcess.spawn(sys.executable, {})
    await worker.spoke.wait()
    print(worker.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        worker = int(front.stdout.readline())
        assert _running(worker)
        front.kill()
        _wait(lambda: not _running(worker))


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_no_verifiers_in_the_front() -> None:
    # A process of its own: other tests may have imported more.
    script = "import quartet_envhost.__main__, sys; print('verifiers' in sys.modules, 'torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, env=os.environ.copy()
    )
    out, _ = await process.communicate()
    assert out.decode().split() == ["False", "False"]
