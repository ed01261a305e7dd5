"""A trainer that does what it is told when it is told, and who has runs of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker import bodies
from quartet_tinker.config import GatewayConfig
from quartet_tinker.gateway import Gateway
from quartet_tinker.paths import run_id
from quartet_tinker.runs import Runs
from quartet_tinker.sessions import Session, Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run


class Trainer:
    """Says of each run that it has the state "kept"; what it is told waits for `may`."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.max_runs = 8
        self.may = asyncio.Event()
        self.waits = asyncio.Event()

    async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
        if run_id not in self.open and len(self.open) >= self.max_runs:
            raise QuartetError("OVERLOADED", f"{self.max_runs} runs are open (max_runs)")
        self.open.add(run_id)
        self.waits.set()
        await self.may.wait()
        return pb.RunState(run_id=run_id)

    async def get(self, run_id: str) -> pb.RunState:
        return pb.RunState(run_id=run_id)

    async def states(self, run_id: str) -> list[pb.SavedState]:
        return [pb.SavedState(name="kept")]

    async def load(self, run_id: str, seq_id: int, name: str) -> pb.RunState:
        return pb.RunState(run_id=run_id)

    async def close(self, run_id: str) -> None:
        self.waits.set()
        await self.may.wait()
        self.open.discard(run_id)


class Counts:
    """Of samplers, what runs need."""

    def count_again(self, run_id: str) -> None:
        pass


def runs_of(trainer: Trainer, sessions: Sessions, folder: Path, takeover_seconds: float = 30.0) -> Runs:
    config = GatewayConfig(
        trainer="127.0.0.1:1", inference=["127.0.0.1:2"], takeover_seconds=takeover_seconds
    )

    async def end(session_id: str, why: str) -> None:
        session = sessions.take_out(session_id)
        assert session is not None
        for training in session.models.values():
            await training.close()
            await runs.close(training.run)

    runs = Runs(config, cast(Any, trainer), sessions, cast(Any, Counts()), Notes(folder), end)
    return runs


def left_open(folder: Path) -> None:
    """The notes of a gateway that was killed."""
    notes = Notes(folder)
    for name in "ab":
        notes.keep(Run(f"s.train.{name}", f"s:train:{name}", "model", pb.RunSpec(), {"of": name}))


def load_of(name: str) -> bodies.LoadWeights:
    path = f"tinker://s:train:{name}/weights/kept"
    return bodies.LoadWeights(path=path, optimizer=True, session_id="t", model_seq_id=0)


def run_in(session: Session, number: int = 0) -> Run:
    origin = f"{session.session_id}:train:{number}"
    return Run(run_id(origin), origin, "model", pb.RunSpec())


async def gateway_with(
    trainer: Trainer, models: int, takeover_seconds: float = 30.0
) -> tuple[Gateway, Session]:
    """A gateway, and a session of it with so many models; the trainer is told to wait from then on."""
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    config = config.model_copy(update={"takeover_seconds": takeover_seconds})
    gateway = Gateway(config, cast(Any, trainer), cast(Any, None))
    session = gateway.sessions.find(gateway.create_session(bodies.CreateSession())["session_id"])
    trainer.may.set()
    for number in range(models):
        await gateway._runs.open(session, run_in(session, number))
    trainer.may.clear()
    trainer.waits.clear()
    return gateway, session
