"""A worker process as the front sees it: how it is started and stopped, and when it is silent."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quartet.errors import MAX_METADATA_KEYS, QuartetError
from quartet.v1.envhost_service_pb2 import ModelAnswer, ModelQuestion
from quartet_envhost import watch
from quartet_envhost.frames import MAX_PAYLOAD_BYTES, Kind
from quartet_envhost.process import WorkerDied, WorkerProcess
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

#: Speaks as a worker does at first, and answers what it is asked with something else.
BREAKS = """
import socket, struct, sys, time
line = socket.socket(fileno=int(sys.argv[1].partition("=")[2]))
line.sendall(struct.pack("<IBQ", 0, 1, 0))
line.recv(65536)
line.sendall({said!r})
time.sleep(600)
"""

#: Speaks as a worker does at first, and ends by a signal that has no name.
ENDS_ITSELF = """
import os, socket, struct, sys
line = socket.socket(fileno=int(sys.argv[1].partition("=")[2]))
line.sendall(struct.pack("<IBQ", 0, 1, 0))
line.recv(65536)
os.kill(os.getpid(), 40)
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


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<IBQ", len(payload), kind, 1) + payload


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<IBQ", MAX_PAYLOAD_BYTES + 1, Kind.OK, 1),
        frame(99, b""),
        frame(Kind.ERROR, b"not JSON"),
        frame(Kind.ERROR, b"[]"),
        frame(Kind.ERROR, b'{"message": "of no reason", "metadata": {}}'),
        frame(Kind.ERROR, b'{"reason": [], "message": "m", "metadata": {}}'),
        frame(Kind.ERROR, b'{"reason": "INTERNAL", "message": 5, "metadata": {}}'),
        frame(Kind.ERROR, b"[" * 200_000),
        frame(Kind.HEARTBEAT, b"\xff"),
        frame(Kind.QUESTION, b"\xff"),
    ],
)
async def test_a_worker_that_says_what_no_worker_says_is_ended_and_so_are_its_calls(
    interpreter: Callable[[str], Made], said: bytes
) -> None:
    """process.py 1, frames.py 3: nobody waits for an answer that cannot come, and no buffer grows for it."""
    python, _ = interpreter(BREAKS.replace("{said!r}", repr(said).replace("{", "{{").replace("}", "}}")))
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 60)

    async def ask(_: ModelQuestion) -> ModelAnswer:
        raise AssertionError("there is no question")

    with pytest.raises(WorkerDied, match="broke its line"):
        await asyncio.wait_for(worker.call(Kind.INTERACT, b"", ask), 60)
    assert not worker.alive
    with pytest.raises(WorkerDied, match="broke its line"):
        await worker.call(Kind.TASKS, b"")


async def test_a_worker_that_a_nameless_signal_ends_ends_its_calls(
    interpreter: Callable[[str], Made],
) -> None:
    """process.py 1: most of the real-time signals have a number alone."""
    python, _ = interpreter(ENDS_ITSELF)
    worker = await WorkerProcess.spawn(python, {})
    with pytest.raises(WorkerDied, match=r"was killed by signal 40"):
        await asyncio.wait_for(worker.call(Kind.TASKS, b""), 60)
    assert await worker.wait() == f"worker {worker.pid} was killed by signal 40"


async def test_a_worker_that_ended_takes_no_calls_while_its_folder_is_removed(
    interpreter: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """process.py 1 and 5"""
    removing, removed = threading.Event(), threading.Event()

    def remove(folder: Path, *, ignore_errors: bool) -> None:
        removing.set()
        removed.wait(120)

    monkeypatch.setattr("quartet_envhost.process.shutil.rmtree", remove)
    worker = await WorkerProcess.spawn(interpreter(ENDS_ITSELF)[0], {"HOME": str(tmp_path)})
    try:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="was killed by signal 40"):
                await asyncio.wait_for(worker.call(Kind.TASKS, b""), 60)
            assert await asyncio.to_thread(removing.wait, 60)
        assert not worker.alive
    finally:
        removed.set()
    await worker.stop()


async def test_an_error_of_a_newer_release_is_told_under_the_reason_that_promises_nothing(
    interpreter: Callable[[str], Made],
) -> None:
    """process.py 1: the interpreter of an environment may have another release than the host."""
    metadata = {**{f"key{number}": "k" for number in range(MAX_METADATA_KEYS - 1)}, "message": "m"}
    content = {"reason": "TO_COME", "message": "why", "metadata": metadata}
    said = frame(Kind.ERROR, json.dumps(content).encode())
    python, _ = interpreter(BREAKS.replace("{said!r}", repr(said).replace("{", "{{").replace("}", "}}")))
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 60)
    with pytest.raises(QuartetError, match="INTERNAL: why") as told:
        await asyncio.wait_for(worker.call(Kind.TASKS, b""), 60)
    assert told.value.metadata == {**metadata, "unknown_reason": "TO_COME"}
    assert worker.alive
    worker.kill("enough")
    await worker.wait()


async def test_a_frame_that_is_too_large_is_never_sent(interpreter: Callable[[str], Made]) -> None:
    """frames.py 3: the call fails where it is made, and the worker lives on."""
    python, _ = interpreter(TAKES_DOWN)
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 60)
    with pytest.raises(AssertionError, match="frame of"):
        await worker.call(Kind.TASKS, bytes(MAX_PAYLOAD_BYTES + 1))
    assert worker.alive and worker.open_calls == 0
    await worker.stop()


async def test_a_worker_that_is_stopped_takes_down_what_it_started(
    interpreter: Callable[[str], Made],
) -> None:
    """process.py 2."""
    python, done = interpreter(TAKES_DOWN)
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 60)
    await worker.stop()
    assert done.exists()


async def test_a_host_that_did_not_run_blames_no_worker_for_it(
    interpreter: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """watch.py 1, 2, process.py 3: both were paused; one that then says nothing all the same is stopped."""
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    python, _ = interpreter(TAKES_DOWN)
    worker = await WorkerProcess.spawn(python, {})
    await asyncio.wait_for(worker.spoke.wait(), 60)
    why = asyncio.create_task(watched(worker, "env", Limits(1000.0, 1000, silence_s=2.0)))
    await asyncio.sleep(0.01)
    time.sleep(3.0)  # noqa: ASYNC251 - the loop does not turn
    await asyncio.sleep(0.3)
    assert worker.alive
    assert "was silent for" in await asyncio.wait_for(why, 60)
