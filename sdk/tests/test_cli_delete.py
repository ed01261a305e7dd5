"""`quartet delete`, as a process, with and without somebody at a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from quartet.cli.delete import _size
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.unreachable import was_not_made
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc

QUESTION = "delete run 'r' for good: its journal (4.0 MiB), 2 states at the trainer (1.5 GiB)? [y/N] "
DONE = "run 'r' is deleted: its journal (4.0 MiB), 2 states at the trainer (1.5 GiB)\n"
WORKS = "run 'working' is TRAINING and cannot be deleted; stop it first with 'quartet stop working'"
WAIT_S = 60.0
#: What sleeps whenever it is looked at waits for the terminal.
STANDS_LOOKS = 10
#: `quartet`, with Ctrl-C: what runs the tests in the background has it ignored, and that is inherited.
COMMAND = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('quartet.cli', run_name='__main__', alter_sys=True)"
)


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Three runs that can be deleted, and one that works."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.there = {"r", "s", "lost"}
        self.lost = 0

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: object) -> pb.DeleteRunResponse:
        if request.run_id == "working":
            raise QuartetError("INVALID_REQUEST", WORKS, field="run_id")
        if request.run_id == "lost" and not request.dry_run:  # the orchestrator was ended over it
            self.there.discard("lost")
            self.lost += 1
            if self.lost == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # type: ignore[attr-defined]
        if request.run_id not in self.there:
            raise QuartetError("RUN_UNKNOWN", f"there is no run {request.run_id!r} here", run_id="r")
        self.asked.append(request.dry_run)
        if not request.dry_run:
            self.there.remove(request.run_id)
        return pb.DeleteRunResponse(journal_bytes=4 << 20, states=2, states_bytes=3 << 29)


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, str]]:
    servicer = Orchestrator()
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start([Service("quartet.v1.OrchestratorService", add, servicer)], ServerConfig(), Health())
    yield servicer, server.address
    await server.stop(0)


def sleeps(pid: int) -> bool:
    """Whether its main thread waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


async def interrupted(process: asyncio.subprocess.Process) -> None:
    """As by a person, who has read the question: what comes just before the terminal is read is seen after.

    Once: where it is on its way out, another one would kill it.
    """
    looks = 0
    async with asyncio.timeout(WAIT_S):
        while looks < STANDS_LOOKS:
            looks = looks + 1 if sleeps(process.pid) else 0
            await asyncio.sleep(0.02)
    process.send_signal(signal.SIGINT)


async def deleted(
    address: str, *more: str, run: str | tuple[str, ...] = "r", answer: str | None = None
) -> tuple[int, str]:
    """Exit code and everything printed; with an answer it is asked for at a terminal, "^C" is that."""
    ours, terminal = pty.openpty()
    runs = (run,) if isinstance(run, str) else run
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "delete", *runs, "--orchestrator", address, *more),
        stdin=asyncio.subprocess.DEVNULL if answer is None else terminal,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    os.close(terminal)
    said = b""
    try:
        if answer is not None:
            assert process.stdout is not None
            async with asyncio.timeout(WAIT_S):
                while not said.endswith(b"[y/N] "):
                    said += await process.stdout.read(1)
            if answer == "^C":
                await interrupted(process)
            else:
                os.write(ours, answer.encode())
        rest, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        os.close(ours)
    assert process.returncode is not None
    return process.returncode, (said + rest).decode()


async def test_who_says_yes_at_a_terminal_has_it_deleted(orchestrator: tuple[Orchestrator, str]) -> None:
    """delete.py 1."""
    servicer, address = orchestrator
    assert await deleted(address, answer="y\n") == (0, QUESTION + DONE)
    assert servicer.asked == [True, False]
    code, printed = await deleted(address, "--yes")
    assert code == 1 and "RUN_UNKNOWN: there is no run 'r' here" in printed


@pytest.mark.parametrize(("answer", "code"), [("\n", 1), ("no\n", 1), ("\x04", 1), ("^C", 130)])
async def test_who_says_anything_else_has_not(
    orchestrator: tuple[Orchestrator, str], answer: str, code: int
) -> None:
    """delete.py 1 and 2."""
    servicer, address = orchestrator
    found, printed = await deleted(address, answer=answer)
    assert found == code and printed.startswith(QUESTION)
    assert ("nothing was deleted" in printed) == (code == 1)
    assert servicer.asked == [True] and "r" in servicer.there


async def test_without_a_terminal_yes_is_said_beforehand(orchestrator: tuple[Orchestrator, str]) -> None:
    """delete.py 1."""
    servicer, address = orchestrator
    code, printed = await deleted(address)
    assert code == 2 and not servicer.asked
    assert "asks at a terminal whether run 'r' may go, and there is none; add --yes" in printed
    assert await deleted(address, "--yes") == (0, DONE)
    assert servicer.asked == [True, False]


@pytest.mark.parametrize(
    ("run", "code", "said"),
    [("other", 1, "RUN_UNKNOWN: there is no run 'other' here"), ("working", 2, WORKS)],
)
async def test_nobody_is_asked_about_a_run_that_cannot_go(
    orchestrator: tuple[Orchestrator, str], run: str, code: int, said: str
) -> None:
    """reaching.py 1."""
    servicer, address = orchestrator
    ours, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet.cli", "delete", run, "--orchestrator", address),
        stdin=terminal,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    os.close(terminal)
    printed, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    os.close(ours)
    assert (process.returncode, printed.decode()) == (code, f"error: {said}\n") and not servicer.asked
    assert await deleted(address, "--yes", run=run) == (code, f"error: {said}\n")


async def test_of_several_all_go_or_none(orchestrator: tuple[Orchestrator, str]) -> None:
    """delete.py 3."""
    servicer, address = orchestrator
    assert await deleted(address, "--yes", run=("r", "working")) == (2, f"error: {WORKS}\n")
    assert servicer.there == {"r", "s", "lost"}
    asked = (
        "delete runs 'r', 's' for good: their journals (8.0 MiB), 4 states at the trainer (3.0 GiB)? [y/N] "
    )
    code, printed = await deleted(address, run=("r", "s", "r"), answer="y\n")
    assert (code, printed) == (0, asked + DONE + DONE.replace("'r'", "'s'"))
    assert servicer.there == {"lost"}


async def test_a_lost_answer_is_asked_for_again_and_a_run_that_is_gone_by_then_is_deleted(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    """delete.py 4."""
    servicer, address = orchestrator
    said = "run 'lost' is deleted: the answer that tells what it had was lost\n"
    assert await deleted(address, "--yes", run="lost") == (0, said)
    assert servicer.lost == 2
    servicer.lost = 0
    code, printed = await deleted(address, "--yes", run="lost")
    assert code == 1 and "RUN_UNKNOWN" in printed
    async with grpc.aio.insecure_channel("no..name:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as nowhere:
            await rpc.OrchestratorServiceStub(channel).DeleteRun(pb.DeleteRunRequest())
    assert was_not_made(nowhere.value.details() or ""), "no answer of such a call is lost"


def test_sizes_are_told_in_units_of_their_own() -> None:
    sizes = (0, 1023, 1536, 4 << 20, 3 << 29, 5 << 40, 7 << 50)
    told = ["0 bytes", "1023 bytes", "1.5 KiB", "4.0 MiB", "1.5 GiB", "5.0 TiB", "7168.0 TiB"]
    assert [_size(one) for one in sizes] == told


async def test_all_that_the_command_lacks_without_a_terminal_is_told_at_once() -> None:
    """delete.py 1."""
    bare = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet.cli", "delete", "r"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={key: one for key, one in os.environ.items() if not key.startswith("QUARTET_")},
    )
    said = (await bare.communicate())[1].decode()
    assert bare.returncode == 2 and "give --orchestrator HOST:PORT" in said and "add --yes" in said, "at once"
