"""Who has a run while others close it, against a trainer that does what it is told when it is told."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker import bodies
from quartet_tinker.config import GatewayConfig
from quartet_tinker.gateway import Gateway
from quartet_tinker.paths import run_id
from quartet_tinker.promises import Answer, Promises, answered
from quartet_tinker.refusal import Refused
from quartet_tinker.runs import Runs
from quartet_tinker.sessions import Session, Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run, Training
from structlog.testing import capture_logs


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


def test_a_note_that_cannot_be_read_keeps_no_other_from_being_closed(tmp_path: Path) -> None:
    """Cut off by a loss of power, of somebody else, of a later release."""
    left_open(tmp_path)
    sound = json.loads((tmp_path / "s.train.a.json").read_text())
    for name, text in (
        ("empty", ""),
        ("list", "[]"),
        ("other", "{}"),
        ("later", json.dumps({**sound, "spec": {**sound["spec"], "unheard_of": 1}})),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    assert [run.run_id for run in Notes(tmp_path).left_open()] == ["s.train.a", "s.train.b"]


async def test_a_run_of_which_the_answer_was_lost_is_closed_also_where_notes_find_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Trainer):
        async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
            await super().create(run_id, spec)
            monkeypatch.setattr(os, "fsync", full)
            raise QuartetError("DEADLINE", "no answer in time")

    trainer, sessions = Lost(), Sessions(2)
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path)
    with pytest.raises(QuartetError, match="no answer in time"):
        await runs.open(sessions.make(), Run("s.train.a", "s:train:a", "model", pb.RunSpec(), {}))
    assert not trainer.open


def full(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_run_that_cannot_be_noted_is_refused_and_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sessions = Trainer(), Sessions(2)
    runs, session = runs_of(trainer, sessions, tmp_path / "notes"), sessions.make()
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refused) as refused:
        await runs.open(session, run_in(session))
    assert f"runs_dir, {str(tmp_path / 'notes')!r}: No space left on device; " in refused.value.sentence
    assert not trainer.open and not session.models
    assert not list((tmp_path / "notes").glob("*")), "nothing unfinished stays"


async def test_a_run_that_is_not_noted_after_its_state_was_loaded_is_closed_with_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Trainer):
        async def load(self, run_id: str, seq_id: int, name: str) -> pb.RunState:
            monkeypatch.setattr(os, "fsync", full)
            return await super().load(run_id, seq_id, name)

    left_open(tmp_path)
    trainer, sessions = Full(), Sessions(2)
    trainer.may.set()
    session = sessions.make()
    with pytest.raises(Refused, match="cannot be noted"):
        await runs_of(trainer, sessions, tmp_path).go_on(session, "t:train:0", load_of("a"))
    assert not trainer.open and not session.models
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("requests of")]


def test_a_note_is_on_the_disk_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes before its name, then the name; of a new folder its own name, too."""
    flushed: list[tuple[str, list[str]]] = []

    def noting(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        names = sorted(one.name for one in path.iterdir()) if path.is_dir() else [path.read_text()]
        flushed.append((path.name, names))

    monkeypatch.setattr(os, "fsync", noting)
    Notes(tmp_path / "notes").keep(Run("r", "s:train:a", "model", pb.RunSpec()))
    text = (tmp_path / "notes" / "r.json").read_text()
    assert flushed == [
        (tmp_path.name, ["notes"]),
        (f"r.{os.getpid()}", [text]),
        ("notes", ["r.json"]),
    ]


def test_a_damaged_note_is_said_of_its_run_and_of_no_other(tmp_path: Path) -> None:
    """A path of it is refused in a sentence; the log names the file."""
    left_open(tmp_path)
    (tmp_path / "s.train.a.json").write_text('{"open": true, "spec"')
    with capture_logs() as said, pytest.raises(Refused, match="note of tinker://s:train:a cannot be read"):
        Notes(tmp_path).find("s:train:a")
    [warning] = said
    assert warning["log_level"] == "warning" and warning["file"] == str(tmp_path / "s.train.a.json")
    assert Notes(tmp_path).find("s:train:b").user_metadata == {"of": "b"}


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


async def test_from_a_run_that_its_script_keeps_another_begins(tmp_path: Path) -> None:
    """runs.py 1"""

    class Noting(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.specs: dict[str, pb.RunSpec] = {}

        async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
            self.specs[run_id] = spec
            return await super().create(run_id, spec)

        async def states(self, run_id: str) -> list[pb.SavedState]:
            return [pb.SavedState(name="kept", path=f"/states/{run_id}/kept@1")]

    trainer, sessions = Noting(), Sessions(2)
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path, takeover_seconds=1)
    holder, coming = sessions.make(), sessions.make()
    spec = pb.RunSpec(base_model="m", lora=pb.LoraSpec(rank=4))
    await runs.open(holder, Run("s.train.a", "s:train:a", "model", spec, {"of": "a"}))
    holder.heard = time.monotonic() + 60
    await runs.go_on(coming, "t:train:0", load_of("a"))
    spec.initial_state = "/states/s.train.a/kept@1"
    assert trainer.specs["t.train.0"] == spec
    assert (list(holder.models), list(coming.models)) == (["s:train:a"], ["t:train:0"])
    assert coming.models["t:train:0"].run.user_metadata == {"of": "a"}
    missing = bodies.LoadWeights(
        path="tinker://s:train:a/weights/kepr", optimizer=True, session_id="t", model_seq_id=1
    )
    with pytest.raises(Refused, match="the run has no state 'kepr', it has kept"):
        await runs.go_on(coming, "t:train:1", missing)
    assert trainer.open == {"s.train.a", "t.train.0"}
    for training in (*holder.models.values(), *coming.models.values()):
        await training.close()


async def test_of_two_scripts_that_go_on_at_once_each_has_a_run(tmp_path: Path) -> None:
    """runs.py 1: from the first, which is heard of, the second does not take it a moment later."""
    left_open(tmp_path)
    trainer, sessions = Trainer(), Sessions(2)
    runs = runs_of(trainer, sessions, tmp_path, takeover_seconds=1)
    first, second = sessions.make(), sessions.make()
    first.heard = second.heard = time.monotonic() + 60
    going_on = [
        asyncio.create_task(runs.go_on(session, f"{name}:train:0", load_of("a")))
        for name, session in (("t", first), ("u", second))
    ]
    await trainer.waits.wait()
    trainer.may.set()
    await asyncio.wait_for(asyncio.gather(*going_on), 30)
    assert [one.run.run_id for one in first.models.values()] == ["s.train.a"]
    assert [one.run.run_id for one in second.models.values()] == ["u.train.0"]
    for training in (*first.models.values(), *second.models.values()):
        await training.close()


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


async def test_a_script_that_ended_without_a_word_gives_its_place_up(tmp_path: Path) -> None:
    """Two scripts are gone, the first for longer; one runs. Two more come to a full trainer."""
    trainer, sessions = Trainer(), Sessions(8)
    trainer.max_runs = 3
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path, takeover_seconds=2)
    gone, also_gone, alive, *coming = (sessions.make() for _ in range(5))
    for session in (gone, also_gone, alive):
        await runs.open(session, run_in(session))
    heard = time.monotonic() + 60
    gone.heard, also_gone.heard, alive.heard = heard - 90, heard - 70, heard
    await runs.open(coming[0], run_in(coming[0]))
    assert trainer.open == {f"{one.session_id}.train.0" for one in (also_gone, alive, coming[0])}
    left_open(tmp_path)
    await runs.go_on(coming[1], f"{coming[1].session_id}:train:0", load_of("a"))
    assert trainer.open == {"s.train.a", *(f"{one.session_id}.train.0" for one in (alive, coming[0]))}
    for session in (alive, *coming):
        for training in session.models.values():
            await training.close()


async def test_scripts_that_run_keep_their_places(tmp_path: Path) -> None:
    """Nobody is silent: who comes is refused, at once where its own models are all that there is."""
    trainer, sessions = Trainer(), Sessions(8)
    trainer.max_runs = 1
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path, takeover_seconds=1)
    alive, coming = sessions.make(), sessions.make()
    await runs.open(alive, run_in(alive))
    alive.heard = time.monotonic() + 60
    for session in (coming, alive):
        with pytest.raises(
            Refused, match=r"takes no other run: 1 runs are open \(max_runs\)\. A script gives"
        ):
            await runs.open(session, run_in(session, 1))
    assert trainer.open == {f"{alive.session_id}.train.0"}
    for training in alive.models.values():
        await training.close()


async def test_who_has_no_place_waits_for_that_of_the_gateways_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runs.py 5; that run itself gets the place of a script that ended without a word."""
    monkeypatch.setattr("quartet_tinker.runs.LOOK_SECONDS", 0.01)
    trainer, sessions = Trainer(), Sessions(8)
    trainer.max_runs = 1
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path)
    gone, coming = sessions.make(), sessions.make()
    await runs.open(gone, run_in(gone))
    gone.heard -= 60
    own, has_it, may_end = Run("s.base", "s:base", "model", pb.RunSpec()), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        has_it.set()
        await may_end.wait()

    async def refused_once() -> None:
        create = trainer.create

        async def told(run_id: str, spec: pb.RunSpec) -> pb.RunState:
            try:
                return await create(run_id, spec)
            except QuartetError:
                may_end.set()
                raise

        monkeypatch.setattr(trainer, "create", told)

    lending = asyncio.create_task(runs.lend(own, work))
    await has_it.wait()
    assert trainer.open == {"s.base"}
    await refused_once()
    await runs.open(coming, run_in(coming))
    await lending
    assert trainer.open == {run_in(coming).run_id}
    assert [run.run_id for run in Notes(tmp_path).left_open()] == [run_in(coming).run_id]
    for training in coming.models.values():
        await training.close()


async def gateway_with(trainer: Trainer, models: int) -> tuple[Gateway, Session]:
    """A gateway, and a session of it with so many models; the trainer is told to wait from then on."""
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    gateway = Gateway(config, cast(Any, trainer), cast(Any, None))
    session = gateway.sessions.find(gateway.create_session(bodies.CreateSession())["session_id"])
    trainer.may.set()
    for number in range(models):
        await gateway._runs.open(session, run_in(session, number))
    trainer.may.clear()
    trainer.waits.clear()
    return gateway, session


async def test_a_session_gives_all_its_runs_back_though_who_ends_it_is_gone_before() -> None:
    """Such as a script that wanted its place and was stopped, or a connection that the gateway's end cuts."""
    trainer = Trainer()
    gateway, session = await gateway_with(trainer, 3)
    ending = asyncio.create_task(gateway.finish(session.session_id, "its script is silent"))
    await trainer.waits.wait()
    ending.cancel()
    await asyncio.wait([ending])
    closing = asyncio.create_task(gateway.close())
    trainer.may.set()
    await closing
    assert not trainer.open


async def test_a_run_that_is_made_while_the_gateway_ends_is_closed() -> None:
    """Also where another run of its session is closed first."""

    class Later(Trainer):
        async def close(self, run_id: str) -> None:
            if run_id.endswith(".1"):
                await asyncio.sleep(0.05)
            await super().close(run_id)

    trainer = Later()
    gateway, session = await gateway_with(trainer, 1)

    async def work() -> Answer:
        await gateway._runs.open(session, run_in(session, 1))
        return answered()

    gateway.promises.begin("made", b"", session.session_id, work())
    await trainer.waits.wait()
    closing = asyncio.create_task(gateway.close())
    await asyncio.sleep(0.01)
    trainer.may.set()
    await closing
    assert not trainer.open


async def test_runs_that_a_trainer_which_was_away_did_not_close_are_closed_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the one that a script goes on with meanwhile."""

    class Away(Trainer):
        is_away = True

        def __init__(self) -> None:
            super().__init__()
            self.has_one = asyncio.Event()

        async def close(self, run_id: str) -> None:
            if self.is_away:
                raise QuartetError("DEADLINE", "nobody answers")
            await super().close(run_id)
            if len(self.open) == 1:
                self.has_one.set()

    monkeypatch.setattr("quartet_tinker.gateway.SWEEP_SECONDS", 0.01)
    trainer = Away()
    gateway, session = await gateway_with(trainer, 3)
    trainer.may.set()
    await gateway.finish(session.session_id, "success")
    assert len(trainer.open) == 3
    script = gateway.sessions.find(gateway.create_session(bodies.CreateSession())["session_id"])
    path = f"tinker://{session.session_id}:train:1/weights/kept"
    load = bodies.LoadWeights(path=path, optimizer=True, session_id=script.session_id, model_seq_id=0)
    await gateway._runs.go_on(script, f"{script.session_id}:train:0", load)
    trainer.is_away = False
    tidying = asyncio.create_task(gateway.tidy())
    await asyncio.wait_for(trainer.has_one.wait(), 60)
    await asyncio.sleep(0.05)
    assert trainer.open == {run_in(session, 1).run_id}
    tidying.cancel()
    await gateway.close()
    assert not trainer.open


async def test_a_model_that_is_unloaded_while_its_session_ends_gives_its_run_back() -> None:
    trainer = Trainer()
    gateway, session = await gateway_with(trainer, 2)
    gateway.unload(f"{session.session_id}:train:0", b"")
    await trainer.waits.wait()
    ending = asyncio.create_task(gateway.finish(session.session_id, "success"))
    await asyncio.sleep(0)
    trainer.may.set()
    await ending
    await gateway.close()
    assert not trainer.open


async def test_what_waits_for_its_turn_is_refused_when_its_model_is_closed() -> None:
    """Another client of the same script goes on with the run: nobody waits for answers of the first."""
    began, promises = asyncio.Event(), Promises()
    run = Run("s.train.0", "s:train:0", "model", pb.RunSpec())
    training = Training(run, cast(Any, Trainer()), 30.0, Notes(None).keep)
    training.begin(pb.RunState())

    async def work() -> Answer:
        began.set()
        await asyncio.Event().wait()
        return answered()

    made = [promises.make(f"s:train:0:{seq_id}", b"", "s")[0] for seq_id in (1, 2, 4)]
    for seq_id, promise in zip((1, 2, 4), made, strict=True):
        training.submit(seq_id, promise, work)
    await began.wait()
    await training.close()
    assert [one.answer is not None for one in made] == [True] * 3
    assert made[2].answer is not None and b"its model was closed before its turn came" in made[2].answer.body


async def test_a_run_that_cannot_be_noted_again_keeps_its_gradients() -> None:
    """A first step with other constants: the run is made again, or nothing has changed."""

    def refuse(_run: Run) -> None:
        raise Refused("the run cannot be noted")

    trainer, run = Trainer(), Run("s.train.0", "s:train:0", "model", pb.RunSpec())
    trainer.may.set()
    trainer.open = {run.run_id}
    training = Training(run, cast(Any, trainer), 30.0, refuse)
    training.begin(pb.RunState())
    with pytest.raises(Refused, match="cannot be noted"):
        await training.optim_step({"learning_rate": 0.1, "eps": 0.5})
    assert trainer.open == {run.run_id} and training.run is run
    await training.close()


async def test_a_run_that_loses_its_place_while_it_is_made_again_says_so() -> None:
    """To the step, and to what comes after it: the run is closed."""

    class Full(Trainer):
        async def create(self, run_id: str, spec: pb.RunSpec) -> pb.RunState:
            raise QuartetError("OVERLOADED", "8 runs are open (max_runs)")

    trainer, run = Full(), Run("s.train.0", "s:train:0", "model", pb.RunSpec())
    trainer.may.set()
    training = Training(run, cast(Any, trainer), 30.0, Notes(None).keep)
    training.begin(pb.RunState())
    promises = Promises()
    step, after = (promises.make(f"s:train:0:{number}", b"", "s")[0] for number in (1, 2))
    training.submit(1, step, lambda: training.optim_step({"learning_rate": 0.1, "eps": 0.5}))
    training.submit(2, after, lambda: training.save_state("x", overwrite=False))
    await after.done.wait()
    for promise in (step, after):
        assert promise.answer is not None
        assert b"could not be made again with what its first step says (8 runs are" in promise.answer.body
    await training.close()


def run_in(session: Session, number: int = 0) -> Run:
    origin = f"{session.session_id}:train:{number}"
    return Run(run_id(origin), origin, "model", pb.RunSpec())
