"""Where an environment's own code raised: real workers of both generations; own_code.py 1-3."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hosting import ENVIRONMENTS, modes, serving
from quartet.v1 import envhost_service_pb2
from quartet_envhost.failures import MAX_MESSAGE_CHARS
from rollout_outcomes import kind, refusal


def place(package: str, code: str, function: str) -> str:
    """Of a line of an environment under envs/, as it is told."""
    lines = (ENVIRONMENTS / package / "__init__.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.strip() == code]
    return f"{package}/__init__.py:{line} in {function}: "


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("mode", "code", "function"),
    [
        ("setup_raises", 'raise KeyError("no such row")', "setup"),
        ("run_raises", 'raise RuntimeError("the environment\'s bug")', "run"),
        ("reward_raises", 'raise ZeroDivisionError("a scorer\'s bug")', "length"),
        ("metric_raises", 'raise LookupError("a metric\'s bug")', "turns"),
        ("quits", 'sys.exit("the environment thinks that it is a program")', "run"),
    ],
)
async def test_a_failure_names_the_line_of_the_environment(
    hosted: Any, mode: str, code: str, function: str
) -> None:
    (rollout,) = await hosted.run(mode)
    assert rollout.failure.message.startswith(place("trial_env", code, function)), rollout.failure


@pytest.mark.asyncio(loop_scope="session")
async def test_what_compares_attempts_is_named_too(hosted: Any) -> None:
    hosted.policy.answer = lambda request, last: "break"
    stream = hosted.stub.RunRollouts(hosted.request("compare-env", task_index=0), timeout=60)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    named = place("compare_env", 'raise LookupError("no scale")', "finalize")
    assert rollout.failure.message.startswith(named), rollout.failure


@pytest.mark.asyncio(loop_scope="session")
async def test_what_the_model_did_has_no_line(hosted: Any) -> None:
    hosted.policy.answer = lambda request, last: "seven"
    (rollout,) = await hosted.run("reward_nan")
    assert rollout.failure.message == "not a finite number: length"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("mode", "code", "function"),
    [
        ("setup_raises", 'raise KeyError("no such row")', "setup_state"),
        ("response_raises", 'raise RuntimeError("the environment\'s bug")', "env_response"),
        ("sandbox_gone", 'raise vf.SandboxError("lost the sandbox")', "env_response"),
    ],
)
async def test_a_classic_failure_names_the_line(classic: Any, mode: str, code: str, function: str) -> None:
    (rollout,) = await classic.run(mode)
    assert rollout.failure.message.startswith(place("classic_env", code, function)), rollout.failure


@pytest.mark.asyncio(loop_scope="session")
async def test_a_classic_reward_function_is_named_with_the_line(classic: Any) -> None:
    """Also where a function of the whole group raises."""
    (rollout,) = await classic.run("reward_raises")
    named = place("classic_env", 'case "reward_raises":', "length")
    line = int(re.findall(r":(\d+) in", named)[0]) + 1
    wanted = f"length: classic_env/__init__.py:{line} in length: ZeroDivisionError: a scorer's bug"
    assert rollout.failure.message == wanted
    classic.policy.answer = lambda request, last: "break the group"
    rollouts = await classic.run(args={"kind": "groups"}, members=range(2))
    named = place("classic_env", 'raise LookupError("a group scorer\'s bug")', "rank")
    assert all(named in one.failure.message for one in rollouts), [one.failure for one in rollouts]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_classic_tool_that_ends_its_rollout_is_named_with_what_it_raised(classic: Any) -> None:
    classic.policy.answer = lambda request, last: 'call divide {"a": 1, "b": 0}'
    (rollout,) = await classic.run(args={"kind": "tools"})
    named = place("classic_env", "return a / b", "divide")
    assert kind(rollout) == "TOOL", rollout.failure
    assert rollout.failure.message == f"{named}ToolCallError: ZeroDivisionError: division by zero"


@pytest.mark.asyncio(loop_scope="session")
async def test_what_does_not_load_names_the_line(classic: Any) -> None:
    error = await refusal(classic.run(args={"kind": "broken"}, env_id="unloadable-env"))
    named = place("unloadable_env", 'raise FileNotFoundError("no data here")', "load_environment")
    assert f"does not load: {named}FileNotFoundError: no data here" in error.message


@pytest.mark.asyncio(loop_scope="session")
async def test_a_program_that_ends_where_it_should_load_is_refused_with_its_line(classic: Any) -> None:
    """loading.py 2: the worker ended without a word of it."""
    error = await refusal(classic.run(args={"kind": "quits"}, env_id="unloadable-env"))
    named = place("unloadable_env", 'sys.exit("no data, no program")', "load_environment")
    assert error.reason == "ENVIRONMENT_UNAVAILABLE"
    assert f"does not load: {named}SystemExit: no data, no program" in error.message


#: Tasksets that are programs: as they are imported, and as they are read.
PROGRAMS = {
    "imported": "import sys\nsys.exit(3)\n",
    "read": """
import sys
import verifiers.v1 as vf

class Words(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        sys.exit(3)

__all__ = ["Words"]
""",
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("program", "told"), [("imported", "2 in <module>"), ("read", "7 in load")])
async def test_a_taskset_that_ends_the_program_is_refused_with_its_line(
    envs_python: str, templates_of_all: Any, written: Path, path: dict[str, Any], program: str, told: str
) -> None:
    package, env_id = f"ending_{program}", f"ending-{program}"
    (written / package).mkdir()
    (written / package / "__init__.py").write_text(PROGRAMS[program])
    settings = {
        "inference_addresses": ["127.0.0.1:1"],
        "python": envs_python,
        "environments": {env_id: path},
    }
    async with serving(settings, templates_of_all) as (_, stub):
        request = envhost_service_pb2.RunRolloutsRequest(
            request_id="one", environment={"id": env_id}, members=[0], timeout_ms=60_000
        )
        error = await refusal(stub.RunRollouts(request, timeout=90))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE"
    assert f"{env_id!r} does not load: {package}/__init__.py:{told}: SystemExit: 3" in error.message


#: An installed environment whose rewards raise in what it calls, and from what that raised.
INSTALLED = """
import installed_library
import verifiers.v1 as vf

def told(said):
    try:
        return installed_library.parsed(said)
    except ValueError as error:
        raise KeyError(said) from error

class Word(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "plain":
            return installed_library.parsed(trace.last_reply)
        return told(trace.last_reply)

class Words(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self):
        yield Word(vf.TaskData(prompt="Say a word."), self.config.task)

__all__ = ["Words"]
"""


async def test_the_place_is_in_the_environment_and_not_in_what_it_calls(
    envs_python: str, tmp_path: Path
) -> None:
    """own_code.py 1 and 2."""
    import scripted_inference

    installed = tmp_path / "site-packages"
    (installed / "installed_env").mkdir(parents=True)
    (installed / "installed_library.py").write_text("def parsed(text):\n    return float(text)\n")
    (installed / "installed_env/rewards.py").write_text(INSTALLED)
    (installed / "installed_env/__init__.py").write_text(
        "from installed_env.rewards import Words\n__all__ = ['Words']\n"
    )
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "environments": {"installed-env": {"env": {"PYTHONPATH": str(installed)}}},
    }
    async with serving(settings) as (_, stub):
        for said, told in (
            ("plain", "rewards.py:15 in right: TaskError: task Word scoring: ValueError: could not convert"),
            ("y" * 5000, "rewards.py:9 in told: TaskError: task Word scoring: KeyError: 'yyyy"),
        ):
            policy.answer = lambda request, last, said=said: said
            request = envhost_service_pb2.RunRolloutsRequest(
                request_id=said[:5], environment={"id": "installed-env"}, members=[0], timeout_ms=60_000
            )
            (rollout,) = [f.rollout async for f in stub.RunRollouts(request) if f.HasField("rollout")]
            assert kind(rollout) == "SCORER", rollout.failure
            assert rollout.failure.message.startswith(f"installed_env/{told}"), rollout.failure
            assert len(rollout.failure.message) <= MAX_MESSAGE_CHARS
    await inference.stop(0)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("package", ["trial_env", "classic_env"])
async def test_the_log_has_each_kind_of_failure_once_with_its_traceback(
    request: pytest.FixtureRequest,
    templates_of_all: Any,
    path: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    package: str,
) -> None:
    """own_code.py 3."""
    import scripted_inference

    python = request.getfixturevalue("envs_python" if package == "trial_env" else "classic_python")
    env_id = package.replace("_", "-")
    inference = await scripted_inference.serve_scripted(scripted_inference.ScriptedInference())
    settings = {
        "inference_addresses": [inference.address],
        "python": python,
        "environments": {env_id: path},
    }
    async with serving(settings, templates_of_all) as (_, stub):
        for mode in ("reward_raises", "setup_raises", "reward_raises"):
            asked = envhost_service_pb2.RunRolloutsRequest(
                request_id=mode,
                environment={"id": env_id},
                members=range(5),
                timeout_ms=60_000,
                task_index=modes(package).index(mode),
            )
            rollouts = [f.rollout async for f in stub.RunRollouts(asked) if f.HasField("rollout")]
            assert len(rollouts) == 5 and all(one.HasField("failure") for one in rollouts)
    await inference.stop(0)
    log = capfd.readouterr().err
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    of_client = [line for line in lines if line["event"] == "replica"]
    told = {"event": "replica", "service": "envhost-worker", "address": inference.address, "level": "info"}
    assert of_client and all(told.items() <= one.items() for one in of_client), log
    assert log.count(inference.address) == len(of_client), "each line of ours is JSON"
    assert log.count("the first failure of its kind") == 2
    for code in ('raise ZeroDivisionError("a scorer\'s bug")', 'raise KeyError("no such row")'):
        assert log.count(code) == 1, log


#: Prints how errors are told, and whether what is logged of them is bounded.
BOUNDS = """
import importlib, logging, sys, sysconfig
from quartet_envhost.own_code import MAX_KINDS, MAX_PLACE_CHARS, MAX_TRACEBACK_CHARS, OwnCode

logged = []
logging.getLogger("quartet_envhost.own_code").addFilter(lambda record: logged.append(record.getMessage()))
own = OwnCode("my-env")

def told(error):
    try:
        raise error
    except BaseException as raised:
        return own.text_of(raised)

LIBRARY = '''
def call(tool):
    try:
        tool()
    except KeyError as error:
        raise LookupError("a tool failed") from error
'''

def told_by_a_tool():
    {}["x"]

first, second = KeyError(1), KeyError(2)
first.__cause__, second.__cause__ = second, first
print(own.text_of(first))
group = ExceptionGroup("several", [LookupError("one of them")])
print(told(group))
for client in ("httpx", "httpx2"):
    http = importlib.import_module(client)
    asked = http.Request("POST", "http://me:secret@judge:8000/v1?key=secret#secret")
    print(own.text_of(http.ConnectError("away", request=asked)))
told(ValueError("y" * 10**6))
for number in range(200):
    told(type(f"Error{number}", (Exception,), {})())
class Mute(Exception):
    def __str__(self):
        raise RuntimeError

print(told(Mute()))
# What a model wrote, and the environment runs.
print(told(SyntaxError("invalid syntax", ("/tmp/of_a_model/answer.py", 3, 1, "(", 3, 2))))
namespace = {}
exec(compile(LIBRARY, sysconfig.get_path("stdlib") + "/tools.py", "exec"), namespace)
try:
    namespace["call"](told_by_a_tool)
except LookupError as raised:
    print(own.text_of(raised))
exec(compile("def f(): 1 / 0", "/" + 200 * "x" + "/rewards.py", "exec"), namespace)
try:
    namespace["f"]()
except ZeroDivisionError as raised:
    text = own.text_of(raised)
print(text[0], text.endswith("/rewards.py:1 in f: ZeroDivisionError: division by zero"))
assert len(text.partition(": ")[0]) == MAX_PLACE_CHARS
assert len(logged) == MAX_KINDS and max(map(len, logged)) < MAX_TRACEBACK_CHARS + 100
"""


def test_what_is_told_and_logged_is_bounded(envs_python: str, tmp_path: Path) -> None:
    """own_code.py 2 to 4: kinds, tracebacks, places, and errors that are each other's cause."""
    program = tmp_path / "program.py"
    program.write_text(BOUNDS)
    line = BOUNDS.splitlines().index("        raise error") + 1
    at = f"{tmp_path.name}/program.py:{line} in told"
    in_tool = BOUNDS.splitlines().index('    {}["x"]') + 1
    assert subprocess.check_output([envs_python, program], text=True).splitlines() == [
        "KeyError: 1",
        f"{at}: ExceptionGroup: several (1 sub-exception)",
        *(2 * ["ConnectError: away (http://judge:8000/v1)"]),
        f"{at}: Mute: (it has no text: its __str__ raises)",
        f"{at}: SyntaxError: invalid syntax (answer.py, line 3)",
        f"{tmp_path.name}/program.py:{in_tool} in told_by_a_tool: LookupError: a tool failed",
        "… True",
    ]


#: Prints how two errors without text are told, as Verifiers records them.
ALIKE = """
import gc; gc.disable()  # imports leave no garbage that counts
import types
from quartet_envhost.own_code import OwnCode
from quartet_envhost.v1.interception import current_policy
from quartet_envhost.v1.raised import key_of, tell_where
from verifiers.v1 import env

tell_where(OwnCode("my-env"))
current_policy.set(policy := types.SimpleNamespace(told={}))
recorded = []
for number in range(2):
    try:
        if number == 0:
            assert number
        assert not number
    except AssertionError as error:
        recorded.append(env._as_error(error))
for one in recorded:
    print(policy.told[key_of(one)])
"""


def test_errors_of_one_text_are_told_with_places_of_their_own(envs_python: str, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(ALIKE)
    lines = [
        ALIKE.splitlines().index(code) + 1
        for code in ("            assert number", "        assert not number")
    ]
    assert subprocess.check_output([envs_python, program], text=True).splitlines() == [
        f"{tmp_path.name}/program.py:{line} in <module>: AssertionError: " for line in lines
    ]
