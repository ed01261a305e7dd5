"""A rollout's own folder on this machine (v1/folders.py): made when it is used, removed with its runtime."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet_envhost import worker
from quartet_envhost.own_folder import folder_of

SCRIPT = """
import asyncio, json
from pathlib import Path
from quartet_envhost.v1.folders import make_folders_when_used
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
"""


def test_a_folder_is_there_for_whoever_uses_it_and_for_nobody_else(envs_python: str, tmp_path: Path) -> None:
    """Promises 1 and 2; `runtime.stop` is what ends a rollout, `cleanup` what ends a process. The last
    of each line: a command that comes late runs nowhere.
    """
    run = subprocess.run(
        [envs_python, "-c", SCRIPT],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert found[:2] == [["unused", False, False, False, True]] * 2
    used = [name for name in ("written", "ran", "read", "crowd") for _ in range(2)]
    assert found[2:] == [[name, False, True, False, True] for name in used]


def test_where_no_folder_can_be_made_the_runtime_does_not_start(envs_python: str, tmp_path: Path) -> None:
    """Promise 3: not after the whole rollout was sampled."""
    (tmp_path / ".cache").write_text("in the way")
    script = "\n".join(
        [*SCRIPT.splitlines()[:7], "asyncio.run(make_runtime(SubprocessConfig(), name='r').start())"]
    )
    run = subprocess.run(
        [envs_python, "-c", script], env={"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    *_, told = run.stderr.splitlines()
    where = tmp_path / ".cache/verifiers/runtimes/subprocess"
    assert run.returncode == 1 and told.startswith("NotADirectoryError") and f"in {where}, which" in told
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


PORTS = """
from quartet_envhost.v1.starts import _last_line, _port_in

async def there(way):
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

print(asyncio.run(there("stop")), asyncio.run(there("cleanup")))
"""


def test_where_a_server_says_its_port_is_removed_with_the_runtime(envs_python: str, tmp_path: Path) -> None:
    """Promise 4: a rollout with a server of its own would leave a file for ever. What it says is read as by
    Verifiers, also where a line ends behind it; and what it printed may be gone."""
    run = subprocess.run(
        [envs_python, "-c", "\n".join([*SCRIPT.splitlines()[:7], PORTS])],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (0, "(1, False, '') (1, False, '')\n"), run.stderr
