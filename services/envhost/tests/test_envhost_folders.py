"""A rollout's own folder on this machine (v1/folders.py): made when it is used, removed with its runtime."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from quartet_envhost import worker
from quartet_envhost.own_folder import folder_of

#: Of one process, each line of what it prints is of a test.
SCRIPT = """
import gc; gc.disable()  # imports leave no garbage that counts
import asyncio, json, shutil
from pathlib import Path
from quartet_envhost.v1.folders import make_folders_when_used
from quartet_envhost.v1.starts import _last_line, _port_in
from verifiers.v1.runtimes import SubprocessConfig, make_runtime

make_folders_when_used()

async def unused(runtime): pass
async def written(runtime): await runtime.write("made/by/a/tool", b"text")
async def ran(runtime): assert (await runtime.run(["pwd"], {})).stdout.strip() == runtime.info.id
async def read(runtime): runtime.workdir
async def crowd(runtime):
    read = [runtime.read("/etc/hostname", max_bytes=100) for _ in range(32)]
    assert len(set(await asyncio.gather(*read))) == 1

async def there(use, way):
    runtime = make_runtime(SubprocessConfig(), name=f"{use.__name__}-{way}")
    assert runtime.workdir is None
    await runtime.start()
    folder = Path(runtime.info.id)
    before = folder.exists()
    await use(runtime)
    after = folder.exists()
    await runtime.stop() if way == "stop" else runtime.cleanup()
    try:
        await runtime.run(["touch", "late"], {})
    except FileNotFoundError as error:
        late = str(folder) in str(error)
    else:
        late = False
    return before, after, folder.exists(), late

for use in (unused, written, ran, read, crowd):
    for way in ("stop", "cleanup"):
        print(json.dumps([use.__name__, *asyncio.run(there(use, way))]))

async def port_of(way):
    runtime = make_runtime(SubprocessConfig(), name=way)
    await runtime.start()
    port = Path(f"{way}-port").absolute()
    server = ["sh", "-c", 'echo 1 > "$MCP_PORT_FILE"']
    await runtime.run_background(server, {"MCP_PORT_FILE": str(port)}, "log")
    while (said := _port_in(port)) is None:
        await asyncio.sleep(0.01)
    folder = runtime.workdir
    await runtime.stop() if way == "stop" else runtime.cleanup()
    return said, port.exists(), _last_line(folder / "log")

for way in ("stop", "cleanup"):
    print(json.dumps(asyncio.run(port_of(way))))

cache = Path.home() / ".cache"
shutil.rmtree(cache)
cache.write_text("in the way")
try:
    asyncio.run(make_runtime(SubprocessConfig(), name="r").start())
except OSError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the user who runs it."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def said(envs_python: str, home: Path) -> list[Any]:
    """What it prints."""
    run = subprocess.run(
        [envs_python, "-c", SCRIPT],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_folder_is_there_for_whoever_uses_it_and_for_nobody_else(said: list[Any]) -> None:
    """Promises 1 and 2; `runtime.stop` is what ends a rollout, `cleanup` what ends a process. The last
    of each line: a command that comes late runs nowhere.
    """
    found = said[:10]
    assert found[:2] == [["unused", False, False, False, True]] * 2
    used = [name for name in ("written", "ran", "read", "crowd") for _ in range(2)]
    assert found[2:] == [[name, False, True, False, True] for name in used]


def test_where_no_folder_can_be_made_the_runtime_does_not_start(said: list[Any], home: Path) -> None:
    """Promise 3: not after the whole rollout was sampled."""
    kind, told = said[12]
    where = home / ".cache/verifiers/runtimes/subprocess"
    assert kind == "NotADirectoryError" and f"in {where}, which" in told
    assert told.endswith("a HOME that it can write")


def test_a_user_without_a_home_has_the_folder_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that nobody entered, in a bare environment: Verifiers looks for the home while it is imported."""
    monkeypatch.setenv("HOME", "/is/left/alone")
    worker._have_home()
    assert os.environ["HOME"] == "/is/left/alone"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    worker._have_home()
    assert os.environ["HOME"] == tempfile.gettempdir()


def test_the_folder_of_a_worker_is_named_alike_by_its_host_and_like_no_other_process(tmp_path: Path) -> None:
    """own_folder.py 1"""
    say = "import os; from quartet_envhost.own_folder import name_of; print(name_of(os.getpid())); input()"
    names = set()
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", say], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            said = process.stdout.readline().strip()
            folder = folder_of(process.pid, {"HOME": str(tmp_path)})
            assert folder == tmp_path / ".cache/verifiers/runtimes/subprocess" / said
            names.add(said.replace(str(process.pid), ""))
            process.stdin.close()
        with pytest.raises(OSError, match="No such"):
            folder_of(process.pid, {"HOME": str(tmp_path)})
    assert len(names) == 2, "also where the number is the same"


def test_where_a_server_says_its_port_is_removed_with_the_runtime(said: list[Any]) -> None:
    """Promise 4: a rollout with a server of its own would leave a file for ever. What it says is read as by
    Verifiers, also where a line ends behind it; and what it printed may be gone."""
    assert said[10:12] == [[1, False, ""]] * 2
