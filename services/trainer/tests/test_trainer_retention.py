"""Which states of a run stay (retention.py), and how a run says it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.content import Content
from quartet_trainer.retention import Retention
from quartet_trainer.states import StateStore


class Killed(BaseException):
    """What a process that was killed does not go on from."""


@dataclass(frozen=True)
class Saved:
    number: int
    kept: bool


def save(store: StateStore, name: str, seq_id: int, **more: Any) -> None:
    tensors = {"weights": {"w": torch.zeros(1)}}
    store.save("r", name, seq_id, seq_id, Content({"value": seq_id}, tensors), **more)


def held(store: StateStore) -> list[str]:
    return [f"{info.name}@{info.seq_id}" for info in store.list("r")]


@given(
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 20),
)
def test_the_newest_stay_and_the_kept_and_never_more_than_the_bound(
    kept: list[bool], own: int, said: int, max_states: int
) -> None:
    """Promises 1 to 3."""
    states = [Saved(number, one) for number, one in enumerate(kept)]
    staying = Retention(own, max_states).staying(states, said)
    newest = states[-(said or own) :]
    wanted = [one for one in states if one.kept or one in newest]
    assert staying == wanted[-max_states:] and states[-1] in staying


def test_kept_states_stay_beside_the_newest(tmp_path: Path) -> None:
    """Promises 1 and 2: names rotate as the orchestrator has them, every third is kept."""
    store = StateStore(tmp_path, 1)
    for number in range(1, 11):
        kept = number % 3 == 0
        save(store, f"step-{number}" if kept else f"state-{number % 2}", number, kept=kept, keep_last=2)
    assert held(store) == ["step-3@3", "step-6@6", "step-9@9", "state-0@10"]
    assert [info.kept for info in store.list("r")] == [True, True, True, False]
    assert store.read(store.find("r", "step-3")).meta == {"value": 3}
    save(store, "closed", 11)  # of a run that does not say it: the trainer's own
    assert held(store) == ["step-3@3", "step-6@6", "step-9@9", "closed@11"]


def test_a_kept_state_is_replaced_by_its_own_call_alone(tmp_path: Path) -> None:
    """states.py 6: a longer run's `final` takes nothing from what was to stay."""
    store = StateStore(tmp_path, 1)
    save(store, "final", 3, kept=True)
    save(store, "final", 3, kept=True)
    assert held(store) == ["final@3"]
    save(store, "state-0", 4)
    save(store, "final", 6)
    assert held(store) == ["final@3", "final@6"] and store.find("r", "final").seq_id == 6
    assert [store.find("r", name).seq_id for name in ("final@3", "final@6")] == [3, 6]
    with pytest.raises(QuartetError, match=r"it has: final@3 \(version 3\), final@6 \(version 6\)"):
        store.find("r", "final@4")


def test_the_operators_bound_takes_the_oldest(tmp_path: Path) -> None:
    """Promise 3."""
    store = StateStore(tmp_path, 1, max_states=3)
    for number in range(1, 6):
        save(store, f"step-{number}", number, kept=True)
    save(store, "state-0", 6, keep_last=5)
    assert held(store) == ["step-4@4", "step-5@5", "state-0@6"]


def test_a_state_that_nobody_keeps_is_written_as_earlier_releases_have_it(tmp_path: Path) -> None:
    """These know no "kept", and read a kept one as any other: the mark's digest is over all that it says."""
    store = StateStore(tmp_path, 2)
    save(store, "plain", 1)
    save(store, "step-2", 2, kept=True)
    plain, kept = (json.loads((info.path / "COMPLETE.json").read_text()) for info in store.list("r"))
    assert "kept" not in plain and kept["kept"] is True
    assert kept.keys() - plain.keys() == {"kept"}


@pytest.mark.parametrize("renamed", [0, 1])
def test_killed_between_saving_and_pruning_nothing_that_stays_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    """Invariant 9. What was to go goes with the next save; the repeated call finds what it saved."""
    store = StateStore(tmp_path, 2)
    for number in range(1, 5):
        save(store, f"step-{number}", number, kept=number == 2, keep_last=4)
    left, plain = [renamed], Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target.name.startswith("@discarded-"):
            if not left[0]:
                raise Killed
            left[0] -= 1
        return plain(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(Killed):
            save(store, "step-5", 5, kept=True, keep_last=1)
    again = StateStore(tmp_path, 2)
    assert held(again)[-1] == "step-5@5" and again.list("r")[-1].kept
    assert len(held(again)) == 5 - renamed
    save(again, "step-5", 5, kept=True, keep_last=1)
    assert held(again) == ["step-2@2", "step-5@5"]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["step-2@2", "step-5@5"]


async def test_a_run_says_what_stays(folder: Path, serve_trainer: Any) -> None:
    """roster.py: by CreateRun, anew each time, also of an open run; by SaveState of one state."""
    spec = pb.RunSpec(base_model=str(folder))

    async def create(trainer: Any, keep_last: int) -> pb.RunState:
        request = pb.CreateRunRequest(run_id="r", spec=spec, keep_last=keep_last)
        return (await trainer.stub.CreateRun(request)).run

    async def names(trainer: Any) -> list[str]:
        states = (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states
        return [f"{one.name}{'*' if one.kept else ''}" for one in states]

    async def save_state(trainer: Any, seq_id: int, **more: Any) -> pb.SavedState:
        request = pb.SaveStateRequest(run_id="r", seq_id=seq_id, **more)
        return (await trainer.stub.SaveState(request)).state

    async with serve_trainer(keep_last=1) as trainer:
        await create(trainer, 3)
        assert (await save_state(trainer, 1, name="step-1", keep=True)).kept
        for seq_id in range(2, 6):
            await save_state(trainer, seq_id, name=f"state-{seq_id}")
        assert await names(trainer) == ["step-1*", "state-3", "state-4", "state-5"]
        # The same call again is the same state; with other contents it is another call.
        assert (await save_state(trainer, 5, name="state-5")).seq_id == 5
        await trainer.refused(save_state(trainer, 5, name="state-5", keep=True), "SEQUENCE_CONFLICT")
        await create(trainer, 2)
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r", save_at_seq_id=5))
        assert (await create(trainer, 2)).applied_seq_id == 5
        assert await names(trainer) == ["step-1*", "state-5", "closed"], "closing goes by the run, too"
    async with serve_trainer(keep_last=1) as trainer:
        await create(trainer, 0)
        # Kept since an earlier process; the run says nothing now, and the trainer keeps one.
        await save_state(trainer, 6, name="state-6")
        assert await names(trainer) == ["step-1*", "state-6"]
        restored = pb.LoadStateRequest(run_id="r", seq_id=7, name="step-1")
        assert (await trainer.stub.LoadState(restored)).run.applied_seq_id == 1
        again = await save_state(trainer, 2, name="state-2")
        assert await names(trainer) == ["step-1*", "state-2"] and not again.kept


async def test_more_states_than_the_operator_allows_are_refused_beforehand(
    folder: Path, serve_trainer: Any
) -> None:
    """admission.py"""
    asked = pb.CheckRunRequest(spec=pb.RunSpec(base_model=str(folder)), keep_states=8)
    async with serve_trainer(max_states=8) as trainer:
        await trainer.stub.CheckRun(asked)
        asked.keep_states = 9
        error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
        assert error.metadata["key"] == "keep_states"
        assert "keeps 8 states of a run at most (max_states); keep fewer" in error.message
