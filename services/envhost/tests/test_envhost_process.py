"""A worker process as the front sees it: what it is started with, and how it is stopped."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from quartet_envhost.process import WorkerProcess

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


def _runs(python: Path, program: Path) -> None:
    """An interpreter that runs this program, whatever it is told to: without what makes it a worker's."""
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)


async def test_the_tools_of_a_worker_are_not_asked_by_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, program, python = tmp_path / "done", tmp_path / "worker.py", tmp_path / "python"
    program.write_text(ASKS.format(done=str(done)))
    _runs(python, program)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.chdir(tmp_path)
    worker = await WorkerProcess.spawn(str(python), {"NO_PROXY": "company.example"})
    await asyncio.wait_for(worker.spoke.wait(), 30)
    await worker.stop()
    assert done.exists()


async def test_a_worker_that_is_stopped_takes_down_what_it_started(tmp_path: Path) -> None:
    done, program, python = tmp_path / "done", tmp_path / "worker.py", tmp_path / "python"
    program.write_text(TAKES_DOWN.format(done=str(done)))
    _runs(python, program)
    worker = await WorkerProcess.spawn(str(python), {})
    await asyncio.wait_for(worker.spoke.wait(), 10)
    await worker.stop()
    assert done.exists()
