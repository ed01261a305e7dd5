"""A trainer of several ranks, started by torchrun as a user would, over gloo on this machine's CPU.

And a group of one, in this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.channel import connect
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

#: Three processes import torch on a machine that is shared.
START_SECONDS = 120.0
END_SECONDS = 60.0


@dataclass
class Ranked:
    """A running group."""

    process: subprocess.Popen[bytes]
    port_file: Path
    log: Path
    state_dir: Path

    def wait_served(self) -> str:
        """Its address, once it serves."""
        deadline = time.monotonic() + START_SECONDS
        while not self.port_file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        return self.port_file.read_text().strip()

    def children(self) -> list[int]:
        """What torchrun has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def rank_pid(self, rank: int) -> int:
        """The process of a rank."""
        return next(
            pid
            for pid in self.children()
            if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        )


def alive(pids: Sequence[int]) -> bool:
    """Whether any of the processes is there."""
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def by_torchrun(ranks: int, restarts: int = 0) -> list[str]:
    """What a user types."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return ["-m", "torch.distributed.run", *options, "-m", "quartet_trainer"]


@contextlib.contextmanager
def running(folder: Path, command: Sequence[str], **config: Any) -> Iterator[Ranked]:
    """Run a trainer of several ranks."""
    folder.mkdir(exist_ok=True)
    log, port_file, states = folder / "log", folder / "port", folder / "states"
    arguments = {"state-dir": states, "device": "cpu", "server.port-file": port_file, **config}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, *command),
                *(text for key, value in arguments.items() for text in (f"--{key}", str(value))),
            ],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        )
    try:
        yield Ranked(process, port_file, log, states)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        finally:
            process.kill()


CONFIG = {"max-runs": 32, "losses.picky": "picky_loss:picky"}


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """One group for all tests: to start it costs more than most of them. It is started again as often as
    test_ranks_death.py kills it."""
    with running(tmp_path_factory.mktemp("ranks"), by_torchrun(2, restarts=2), **CONFIG) as group:
        yield group


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """A group among which few tensors are cut evenly."""
    with running(tmp_path_factory.mktemp("ranks"), by_torchrun(3), **CONFIG) as group:
        yield group


@pytest.fixture
def call_ranks(two_ranks: Ranked) -> Callable[..., Any]:
    """An async context with the group's trainer, as `serve_trainer` has one process's."""
    return partial(calling, two_ranks)


@contextlib.asynccontextmanager
async def calling(group: Ranked) -> AsyncIterator[Any]:
    """A group's trainer; what it has of the run of whoever names none is gone at the end."""
    from .conftest import Served

    async with connect(group.wait_served()) as channel:
        trainer = Served(TrainerServiceStub(channel), channel, group.state_dir)
        yield trainer
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        await trainer.stub.DeleteStates(pb.DeleteStatesRequest(run_id="r"))


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """torch.distributed with one rank."""
    import torch.distributed as dist
    from quartet_trainer.ranks import layout

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        layout.host_mesh.cache_clear()
        dist.destroy_process_group()


@pytest.fixture
def group_of_one(alone_in_a_group: None) -> Any:
    """It without the others that it would meet."""
    from quartet_trainer.ranks import layout
    from quartet_trainer.ranks.group import Group

    made = object.__new__(Group)
    made.rank, made.size, made._mesh, made._context = 0, 1, layout.host_mesh(), None
    made._share, made._shares = 0, 1
    return made
