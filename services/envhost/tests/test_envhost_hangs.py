"""An environment that hangs is named with the line that it hangs at: real workers of both generations, and
processes that stand for one. stack.py 1-4, process.py 4.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hosting import ENVIRONMENTS, modes, serving
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2
from quartet_envhost import keeping
from quartet_envhost import stack as stack_module
from quartet_envhost.own_code import OwnFiles
from quartet_envhost.stack import MAX_STACK_CHARS, Stack, StackFile, read_stack
from rollout_outcomes import kind, until

Asked = Callable[..., Any]
#: For who answers: a process of a busy machine may need longer than it has.
PATIENT_S = 30.0


#: How the lines begin that a reward of a mode hangs at, and their function.
HANGS = {
    "reward_sleeps": (("time.sleep(600)",), "length"),
    "reward_spins": (("while True:", "pass"), "spin"),
    "reward_backtracks": (("re.fullmatch",), "length"),
}


def places(package: str, mode: str) -> tuple[str, ...]:
    """The lines of an environment under envs/ that a mode hangs at, as they are told."""
    codes, function = HANGS[mode]
    lines = (ENVIRONMENTS / package / "__init__.py").read_text().splitlines()
    found = [number for number, text in enumerate(lines, 1) if text.strip().startswith(codes)]
    return tuple(f"{package}/__init__.py:{number} in {function}" for number in found)


@asynccontextmanager
async def hosting_of(
    package: str, python: str, templates: Any, path: dict[str, Any], **settings: Any
) -> AsyncIterator[tuple[Any, Asked]]:
    """A host of one environment under envs/, and what runs a rollout of one of its modes."""
    import scripted_inference

    inference = await scripted_inference.serve_scripted(scripted_inference.ScriptedInference())
    env_id = package.replace("_", "-")
    table = {
        "inference_addresses": [inference.address],
        "python": python,
        "deadline_grace_seconds": 0.5,
        "environments": {env_id: path},
        **settings,
    }

    async def run(mode: str, timeout_ms: int = 60_000) -> Any:
        request = envhost_service_pb2.RunRolloutsRequest(
            request_id=os.urandom(6).hex(),
            environment={"id": env_id},
            members=[0],
            timeout_ms=timeout_ms,
            task_index=modes(package).index(mode),
        )
        (rollout,) = [one.rollout async for one in stub.RunRollouts(request) if one.HasField("rollout")]
        return rollout

    async with serving(table, templates) as (host, stub):
        yield host, run
    await inference.stop(0)


@pytest.fixture
def hosts(
    request: pytest.FixtureRequest, templates_of_all: Any, path: dict[str, Any]
) -> Callable[..., AbstractAsyncContextManager[tuple[Any, Asked]]]:
    """Makes a host of a package of either generation."""

    def make(package: str, **settings: Any) -> AbstractAsyncContextManager[tuple[Any, Asked]]:
        python = request.getfixturevalue("envs_python" if package == "trial_env" else "classic_python")
        return hosting_of(package, python, templates_of_all, path, **settings)

    return make


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("package", "mode"),
    [("trial_env", "reward_sleeps"), ("trial_env", "reward_backtracks"), ("classic_env", "reward_sleeps")],
)
async def test_a_reward_that_hangs_is_named_with_its_line_and_the_log_has_the_stack(
    hosts: Any,
    package: str,
    mode: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the interpreter's lock is held all the while."""
    monkeypatch.setattr(stack_module, "ANSWER_S", PATIENT_S)
    async with hosts(package, stall_seconds=3.0) as (_, run):
        rollout = await run(mode)
    assert kind(rollout) == "HOST" and rollout.failure.retryable
    found, _, why = rollout.failure.message.partition(": ")
    assert found in places(package, mode), rollout.failure
    assert re.fullmatch(r"worker \d+ of environment '.*' was silent for \d+ s and was stopped", why)
    log = "".join(capfd.readouterr())
    assert log.count(found) >= 2, "with the stack, and with the worker's end"
    assert "Current thread" in log and "in _run_module_as_main" in log


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("package", ["trial_env", "classic_env"])
async def test_so_is_one_that_hangs_beyond_the_time_of_its_rollout(
    hosts: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "ANSWER_S", PATIENT_S)
    async with hosts(package) as (_, run):
        await run("ok")
        for seconds in (1, 20):  # a busy machine may take all of the first for the way to the reward
            rollout = await run("reward_spins", timeout_ms=1000 * seconds)
            assert kind(rollout) == "TIMEOUT"
            found, _, why = rollout.failure.message.partition(": ")
            if found in places(package, "reward_spins"):
                break
        assert found in places(package, "reward_spins"), rollout.failure
        assert why == f"not done after {seconds} s, and its worker no longer answered"


@pytest.mark.asyncio(loop_scope="session")
async def test_what_neither_ends_nor_blocks_has_no_line(hosts: Any) -> None:
    """process.py 4: whatever the loop is at, another rollout may have brought it there."""
    async with hosts("trial_env") as (_, run):
        await run("ok")
        rollout = await run("never_gives_up", timeout_ms=500)
        assert kind(rollout) == "TIMEOUT"
        assert rollout.failure.message == "not done after 0.5 s, and its worker no longer answered"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_that_is_stopped_by_a_signal_is_ended_all_the_same(hosts: Any) -> None:
    """stack.py 2."""
    async with hosts("trial_env", stall_seconds=3.0) as (host, run):
        await run("ok")
        under_way = asyncio.create_task(run("scores_slowly"))
        (worker,) = next(iter(host._pools.values())).workers
        await asyncio.wait_for(until(lambda: worker.open_calls), 60)
        os.kill(worker.pid, signal.SIGSTOP)
        started = time.monotonic()
        rollout = await under_way
        assert time.monotonic() - started < 40  # of the minute that it has
        assert kind(rollout) == "HOST" and rollout.failure.message.startswith("worker "), rollout.failure
        assert not (await run("ok")).HasField("failure")


@pytest.mark.asyncio(loop_scope="session")
async def test_one_that_hangs_while_it_is_loaded_is_named(
    hosts: Any, written: Path, path: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MAX_FAILED_STARTS", 1)
    (written / "slow_env.py").write_text("import time\n\nimport verifiers\n\ntime.sleep(600)\n")
    for seconds in (20.0, 120.0):  # a busy machine may take all of the first for what the worker imports
        async with hosts("trial_env", environments={"slow-env": path}, load_timeout_seconds=seconds) as (
            host,
            _,
        ):
            with pytest.raises(QuartetError) as told:
                await host.describe(envhost_service_pb2.EnvironmentRef(id="slow-env"))
        if "slow_env.py" in told.value.message:
            break
    wanted = f"{written.name}/slow_env.py:5 in <module>: environment 'slow-env' was not loaded within"
    assert f"{wanted} {seconds:g} s (load_timeout_seconds)" in told.value.message


#: A process that can be asked, and that prints what looks like a stack; its threads are those of a worker.
HANGING = """
import json, os, sys, threading, time
from quartet_envhost import keeping
from quartet_envhost.own_code import OwnFiles
from quartet_envhost.stack import write_when_asked

def wait(deep):
    if deep:
        return wait(deep - 1)
    os.write(1, b"Current thread 0x1 (most recent call first):\\n")
    os.write(1, b'  File "/other/code.py", line 7 in printed\\n')
    time.sleep(600)

fd, threads, foreign = json.loads(sys.argv[1])
write_when_asked(fd, OwnFiles("some_env", foreign))
for _ in range(threads):
    threading.Thread(target=wait, args=(120,), daemon=True).start()
os.write(1, b"ready\\n")
exec(compile("def hang(): wait(2)\\nhang()", "/own/r\\u00e9ward\\u20ac/rewards.py", "exec"))
"""


async def asked(
    program: Path, threads: int, foreign: list[str], *, hangs: bool = True, stop: bool = False
) -> Stack | None:
    """The stack of such a process, once all of its threads hang."""
    file = StackFile()
    arguments = json.dumps([file.fd, threads, foreign])
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=[file.fd],
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = b""
        while b"ready" not in said or (hangs and said.count(b"Current thread") <= threads):
            line = await process.stdout.readline()
            assert line, said
            said += line
        if stop:
            process.send_signal(signal.SIGSTOP)
        return await asyncio.wait_for(file.ask(process), 60)
    finally:
        process.kill()
        await process.wait()
        file.close()


async def test_the_stack_is_the_process_s_own_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stack.py 1, 3 and 4: of the thread that hangs, whatever others do and whatever is printed."""
    monkeypatch.setattr(stack_module, "ANSWER_S", PATIENT_S)
    (program := tmp_path / "program.py").write_text(HANGING)
    stack = await asked(program, 90, [str(tmp_path)])
    assert stack is not None
    assert stack.place == "réward€/rewards.py:1 in hang"
    assert stack.text.startswith("Current thread") and "/other/code.py" not in stack.text
    assert "\nThread 0x" in stack.text and len(stack.text) == MAX_STACK_CHARS
    stack = await asked(program, 0, ["/own", str(tmp_path)])
    assert stack is not None and stack.place == "" and "in hang" in stack.text


async def test_a_process_that_is_stopped_or_tells_none_has_no_stack(tmp_path: Path) -> None:
    """stack.py 2."""
    (program := tmp_path / "program.py").write_text(HANGING)
    assert await asked(program, 0, [], stop=True) is None
    program.write_text("print('ready', flush=True)\nimport time\ntime.sleep(600)\n")
    assert await asked(program, 0, [], hangs=False) is None


def test_the_innermost_own_line_of_the_thread_that_hangs_is_the_place() -> None:
    """stack.py 4."""
    own = OwnFiles("my_env", ["/usr/lib/python3.11", "/src/verifiers"])
    written = """Thread 0x00007f01 (most recent call first):
  File "/home/me/my_env.py", line 1 in waits
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/x/site-packages/another/parsing.py", line 3 in parsed
  File "/x/site-packages/my_env/rewards.py", line ??? in lost
  File "/x/site-packages/my_env/rewards.py", line 12 in exact
  File "/home/me/helps.py", line 4 in outer
  File "/src/verifiers/rubric.py", line 9 in score
  File "<string>", line 1 in <module>
"""
    stack = read_stack(written, own)
    assert stack.place == "my_env/rewards.py:12 in exact"
    assert stack.text.splitlines()[0].startswith("Current thread")
    assert stack.text.splitlines()[-1].endswith("in run")
    assert read_stack(written.partition("Current")[0], own).place == ""
