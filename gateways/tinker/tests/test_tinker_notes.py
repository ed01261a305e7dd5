"""What the gateway notes of its runs, and what a note that is missing or damaged costs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker.refusal import Refused
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run, Training
from structlog.testing import capture_logs

from .told_trainer import Trainer, left_open, load_of, run_in, runs_of


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
