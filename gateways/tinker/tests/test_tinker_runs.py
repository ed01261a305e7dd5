"""Who has a run while others close it, against a trainer that does what it is told when it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker import bodies
from quartet_tinker.config import GatewayConfig
from quartet_tinker.runs import Runs
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run


class Trainer:
    """Says of each run that it has the state "kept"; what it is told waits for `may`."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.may = asyncio.Event()
        self.waits = asyncio.Event()

    async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
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


def runs_of(trainer: Trainer, sessions: Sessions, folder: Path) -> Runs:
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    return Runs(config, cast(Any, trainer), sessions, cast(Any, Counts()), Notes(folder))


def left_open(folder: Path) -> None:
    """The notes of a gateway that was killed."""
    notes = Notes(folder)
    for name in "ab":
        notes.keep(Run(f"s.train.{name}", f"s:train:{name}", "model", pb.RunSpec(), {"of": name}))


def load_of(name: str) -> bodies.LoadWeights:
    path = f"tinker://s:train:{name}/weights/kept"
    return bodies.LoadWeights(path=path, optimizer=True, session_id="t", model_seq_id=0)


async def test_a_run_that_has_a_model_again_is_not_closed_with_those_left_open(tmp_path: Path) -> None:
    """While the first is being closed, a script goes on with the second."""
    left_open(tmp_path)
    trainer, sessions = Trainer(), Sessions(2)
    trainer.open = {"s.train.a", "s.train.b"}
    runs = runs_of(trainer, sessions, tmp_path)
    tidying = asyncio.create_task(runs.tidy())
    await trainer.waits.wait()
    session = sessions.make()
    going_on = asyncio.create_task(runs.go_on(session, "t:train:0", load_of("b")))
    await asyncio.sleep(0)
    trainer.may.set()
    await asyncio.gather(tidying, going_on)
    assert trainer.open == {"s.train.b"}
    assert session.models["t:train:0"].run.user_metadata == {"of": "b"}
    assert [run.run_id for run in Notes(tmp_path).left_open()] == ["s.train.b"]
    await session.models["t:train:0"].close()


async def test_a_run_is_closed_before_another_session_goes_on_with_it(tmp_path: Path) -> None:
    """A script closes its client and another makes one of its state at once: the second has an open run."""
    left_open(tmp_path)
    trainer, sessions = Trainer(), Sessions(2)
    runs = runs_of(trainer, sessions, tmp_path)
    trainer.open = {"s.train.a"}
    closing = asyncio.create_task(runs.close(Notes(tmp_path).find("s:train:a")))
    await trainer.waits.wait()
    session = sessions.make()
    going_on = asyncio.create_task(runs.go_on(session, "t:train:0", load_of("a")))
    await asyncio.sleep(0)
    trainer.may.set()
    await asyncio.gather(closing, going_on)
    assert trainer.open == {"s.train.a"}
    await session.models["t:train:0"].close()


async def test_a_run_whose_session_ends_while_it_is_made_is_closed(tmp_path: Path) -> None:
    trainer, sessions = Trainer(), Sessions(2)
    session = sessions.make()
    run = Run("s.train.0", "s:train:0", "model", pb.RunSpec())
    making = asyncio.create_task(runs_of(trainer, sessions, tmp_path).open(session, run))
    await trainer.waits.wait()
    making.cancel()
    trainer.may.set()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not trainer.open and not session.models
