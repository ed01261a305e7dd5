"""A worker process as the front sees it: how it is stopped."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

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


async def test_a_worker_that_is_stopped_takes_down_what_it_started(tmp_path: Path) -> None:
    done, program, python = tmp_path / "done", tmp_path / "worker.py", tmp_path / "python"
    program.write_text(TAKES_DOWN.format(done=str(done)))
    # Without what makes it the program of a worker.
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    worker = await WorkerProcess.spawn(str(python), {})
    await asyncio.wait_for(worker.spoke.wait(), 10)
    await worker.stop()
    assert done.exists()
