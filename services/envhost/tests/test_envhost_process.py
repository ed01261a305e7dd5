"""A worker process as the front sees it: how it is started and stopped, and when it is silent."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quartet_envhost import watch
from quartet_envhost.process import WorkerProcess
from quartet_envhost.watch import Limits, watched

#: An interpreter that runs this program, and the file that the program leaves.
Made = tuple[str, Path]

#: Speaks as a worker does at first, and tears down for longer than one that ends by itself may.
TAKES_DOWN = """
import pathlib, socket, struct, sys, time
line = socket.socket(fileno=int(sys.argv[1].partition("=")[2]))
line.sendall(struct.pack("<IBQ", 0, 1, 0))
while line.recv(65536):
    pass
time.sleep(1.5)
pathlib.Path({done!r}).touch()
"""

#: Asks a tool server on this machine as httpx, requests and urllib do: as the environment says.
ASKS = """
import http.server, pathlib, socket, struct, sys, threading, urllib.request
line = socket.socket(fileno=int(sys.argv[1].partition("=")[2]))
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/", timeout=10)
pathlib.Path({done!r}).touch()
line.sendall(struct.pack("<IBQ", 0, 1, 0))
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], Made]:
    """Makes an interpreter that runs a program, whatever it is told to: without what makes it a worker's."""

    def make(text: str) -> Made:
        done, program, python = tmp_path / "done", tmp_path / "worker.py", tmp_path / "python"
        program.write_text(text.format(done=str(done)))
        python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
        python.chmod(0o755)
        return str(python), done

    return make


async def test_the_tools_of_a_worker_are_not_asked_by_a_proxy(
    interpreter: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, done = interpreter(ASKS)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.chdir(tmp_path)
    worker = await WorkerProcess.spawn(python, {"NO_PROXY": "company.example"})
    await asyncio.wait_for(worker.spoke.wait(), 30)
    await worker.stop()
    assert done.exists()


async def test_a_worker_that_is_stopped_takes_down_what_it_started(
    interpreter: Callable[[str], Made],
) -> None:
    python, done = interpreter(TAKES_DOWN)
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 10)
    await worker.stop()
    assert done.exists()


async def test_a_host_that_did_not_run_blames_no_worker_for_it(
    interpreter: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """watch.py 1, 2: both were paused; one that then says nothing all the same is stopped."""
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    python, _ = interpreter(TAKES_DOWN)
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 10)
    why = asyncio.create_task(watched(worker, "env", Limits(1000.0, 1000, silence_s=2.0)))
    await asyncio.sleep(0.01)
    time.sleep(3.0)  # noqa: ASYNC251 - the loop does not turn
    await asyncio.sleep(0.3)
    assert worker.alive
    assert "was silent for" in await asyncio.wait_for(why, 20)
