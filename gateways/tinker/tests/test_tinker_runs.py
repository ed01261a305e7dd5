"""Who has a run while others close it, against a trainer that does what it is told when it is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker import bodies
from quartet_tinker.promises import Answer, Promises, answered
from quartet_tinker.refusal import Refused
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run, Training

from .told_trainer import Trainer, gateway_with, left_open, load_of, run_in, runs_of


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


async def test_a_run_is_taken_over_once_what_the_trainer_began_is_applied(tmp_path: Path) -> None:
    """A script was stopped while it waited: the trainer goes on, and says until then that nothing is."""

    class Computing(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.applied = 0
            self.began = asyncio.Event()

        async def save(self, run_id: str, seq_id: int, name: str) -> None:
            async def compute() -> None:
                for _ in range(100):
                    await asyncio.sleep(0)
                self.applied = seq_id

            self.began.set()
            await asyncio.shield(asyncio.create_task(compute()))

        async def get(self, run_id: str) -> pb.RunState:
            return pb.RunState(run_id=run_id, applied_seq_id=self.applied)

        async def load(self, run_id: str, seq_id: int, name: str) -> pb.RunState:
            if (self.applied, seq_id) != (1, 2):
                raise QuartetError("SEQUENCE_CONFLICT", f"seq_id {seq_id} was given with other contents")
            return pb.RunState(run_id=run_id)

    trainer, sessions, promises = Computing(), Sessions(2), Promises()
    trainer.may.set()
    runs, session = runs_of(trainer, sessions, tmp_path), sessions.make()
    await runs.open(session, Run("s.train.a", "s:train:a", "model", pb.RunSpec()))
    stopped = session.models["s:train:a"]
    promise, _ = promises.make("s:train:a:1", b"", "s")
    stopped.submit(1, promise, lambda: stopped.save_state("more", overwrite=False))
    await trainer.began.wait()
    await runs.go_on(session, "t:train:0", load_of("a"))
    assert list(session.models) == ["t:train:0"] and promise.answer is not None
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


async def test_a_gateway_that_did_not_run_itself_takes_nobody_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runs.py 6: who waits for a place is due first on waking; and no request is missing by then."""
    trainer, sessions, promises = Trainer(), Sessions(8), Promises()
    trainer.max_runs = 1
    trainer.may.set()
    runs = runs_of(trainer, sessions, tmp_path, takeover_seconds=150)
    alive, coming = sessions.make(), sessions.make()
    await runs.open(alive, run_in(alive))
    (training,) = alive.models.values()
    second, _ = promises.make("second", b"", "s")
    training.submit(2, second, lambda: training.save_state("x", overwrite=False))
    opening = asyncio.create_task(runs.open(coming, run_in(coming)))
    await asyncio.sleep(0.1)
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 200)  # and gap_seconds are 120
    await asyncio.sleep(0.1)
    assert alive.session_id in sessions.ids() and not opening.done()
    assert not training._broken and second.answer is None
    opening.cancel()
    await asyncio.wait([opening])
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


async def test_a_gateway_that_ends_asks_for_all_its_runs_at_once() -> None:
    """Of a trainer that does not answer each is waited for, for a minute: together no longer than one."""

    class Asked(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.asked: set[str] = set()

        async def close(self, run_id: str) -> None:
            self.asked.add(run_id)
            if self.asked == self.open:
                self.may.set()
            await self.may.wait()

    trainer = Asked()
    gateway, _ = await gateway_with(trainer, 2)
    other = gateway.sessions.find(gateway.create_session(bodies.CreateSession())["session_id"])
    trainer.may.set()
    await gateway._runs.open(other, run_in(other))
    trainer.may.clear()
    await asyncio.wait_for(gateway.close(), 20)
    assert len(trainer.asked) == 3


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


async def test_nobody_waits_for_long_to_end_a_session_and_the_next_has_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gateway.py 1 and runs.py 4: a script is stopped while the trainer is at a long call of its."""
    monkeypatch.setattr("quartet_tinker.gateway.FINISH_SECONDS", 0.01)
    trainer = Trainer()
    gateway, session = await gateway_with(trainer, 1)
    trainer.max_runs = 1
    await asyncio.wait_for(gateway.finish(session.session_id, "interrupted"), 20)
    assert trainer.open == {run_in(session).run_id}, "it is still at it"
    coming = gateway.sessions.find(gateway.create_session(bodies.CreateSession())["session_id"])
    opening = asyncio.create_task(gateway._runs.open(coming, run_in(coming)))
    await asyncio.sleep(0.05)
    trainer.may.set()
    await asyncio.wait_for(opening, 20)
    assert trainer.open == {run_in(coming).run_id}
    await gateway.close()


async def test_for_one_place_one_silent_session_ends_however_long_its_run_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """runs.py 4: for longer than whoever comes would wait for a place that is not on its way."""
    monkeypatch.setattr("quartet_tinker.gateway.FINISH_SECONDS", 0.01)
    monkeypatch.setattr("quartet_tinker.runs.LOOK_SECONDS", 0.01)
    trainer = Trainer()
    gateway, gone = await gateway_with(trainer, 1, takeover_seconds=0.1)
    also_gone, coming = gateway.sessions.make(), gateway.sessions.make()
    trainer.may.set()
    await gateway._runs.open(also_gone, run_in(also_gone))
    trainer.may.clear()
    trainer.max_runs = 2
    gone.heard, also_gone.heard = gone.heard - 90, also_gone.heard - 60
    opening = asyncio.create_task(gateway._runs.open(coming, run_in(coming)))
    await asyncio.wait([opening], timeout=0.5)
    assert trainer.open == {run_in(gone).run_id, run_in(also_gone).run_id}, "it is still at it"
    assert not opening.done() and also_gone.models
    trainer.may.set()
    await asyncio.wait_for(opening, 20)
    assert trainer.open == {run_in(also_gone).run_id, run_in(coming).run_id}
    await gateway.close()


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
