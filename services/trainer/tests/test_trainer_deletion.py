"""Deleting the states of a run: all of them, whatever happens on the way, and no other run's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import deletion as deleting
from quartet_trainer.content import Content
from quartet_trainer.deletion import Deletion, Stock
from quartet_trainer.states import META, StateStore

from .conftest import run_spec

Make = Callable[..., Any]
#: For what happens beside: ten seconds.
LOOKS = 200


async def two_states(trainer: Any, run_id: str, folder: Path, make_samples: Make) -> list[pb.SavedState]:
    """A run with a state, and one with a model, that is closed."""
    await trainer.create(run_id, base_model=str(folder))
    saved = []
    for seq_id, export in ((1, False), (2, True)):
        request = pb.SaveStateRequest(run_id=run_id, seq_id=seq_id, name=f"s{seq_id}", export_model=export)
        saved.append((await trainer.stub.SaveState(request)).state)
    await trainer.stub.CloseRun(pb.CloseRunRequest(run_id=run_id))
    return saved


async def delete(trainer: Any, run_id: str, **fields: Any) -> pb.DeleteStatesResponse:
    response = await trainer.stub.DeleteStates(pb.DeleteStatesRequest(run_id=run_id, **fields))
    assert isinstance(response, pb.DeleteStatesResponse)
    return response


def below(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


class Listed:
    """What a folder had, before something happened."""

    def __init__(self, found: Any, happens: Callable[[], None]) -> None:
        with found as entries:
            self._entries = iter(list(entries))
        happens()

    def __iter__(self) -> Any:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Listed:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("listing", [1, 2])
def test_what_goes_while_it_is_counted_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: int
) -> None:
    """A dry run may be of a run that is open, and prunes: before a state is looked into, or its files are."""
    store, plain, left = StateStore(tmp_path, 1), os.scandir, [listing]
    info = store.save("r", "a", 1, 0, Content({}, {"weights": {"w": torch.ones(1)}}))

    def goes() -> None:
        left[0] -= 1
        if not left[0]:
            info.path.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(os, "scandir", lambda path: Listed(plain(path), goes))
    assert Deletion(tmp_path, store).stock("r") == Stock(1, 0)


async def test_all_states_go_and_the_name_is_free(
    folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """deletion.py 1 and 3."""
    async with serve_trainer() as trainer:
        saved = await two_states(trainer, "a", folder, make_samples)
        await two_states(trainer, "a.b", folder, make_samples)
        there = await delete(trainer, "a", dry_run=True)
        assert there.states == 2 and there.size_bytes >= sum(one.size_bytes for one in saved)
        assert below(trainer.state_dir) == {"a", "a.b"}, "a dry run deletes nothing"
        assert await delete(trainer, "a") == there
        assert below(trainer.state_dir) == {"a.b"}
        assert await delete(trainer, "a") == pb.DeleteStatesResponse(), "again is nothing"
        again = await trainer.create("a", base_model=str(folder), seed=5, learning_rate=1e-3)
        assert (again.applied_seq_id, again.policy_version) == (0, 0)
        assert (await trainer.create("a.b", base_model=str(folder))).applied_seq_id == 2


async def test_an_open_run_keeps_its_states(folder: Path, serve_trainer: Make) -> None:
    """roster.py 6."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "there")
        error = await trainer.refused(delete(trainer, "r"), "RUN_CONFLICT")
        assert "close it with CloseRun first" in error.message
        assert (await delete(trainer, "r", dry_run=True)).states == 1
        assert (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states


async def test_a_state_goes_by_its_name_open_or_not(folder: Path, serve_trainer: Make) -> None:
    """deletion.py 5, and roster.py 6."""

    async def delete_one(name: str, **fields: Any) -> int:
        request = pb.DeleteStateRequest(run_id="r", name=name, **fields)
        return int((await trainer.stub.DeleteState(request)).states)

    async def names() -> list[str]:
        return [one.name for one in (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states]

    ours, another = (run_spec(base_model=str(folder), seed=seed) for seed in (0, 1))
    async with serve_trainer(keep_last=8) as trainer:
        await trainer.create(base_model=str(folder))
        kept = pb.SaveStateRequest(run_id="r", seq_id=1, name="twice", keep=True)
        await trainer.stub.SaveState(kept)
        for seq_id, name in enumerate(("before", "twice", "newest"), 2):
            await trainer.save(seq_id, name)
        error = await trainer.refused(delete_one("twice", spec=another), "RUN_CONFLICT")
        assert "state twice of run r is of another run of that name" in error.message
        assert await names() == ["twice", "before", "twice", "newest"]
        assert await delete_one("twice", spec=ours) == 2, "also the one that was to stay"
        assert (await delete_one("newest"), await delete_one("newest")) == (1, 0), "again is nothing"
        assert await names() == ["before"]
        assert {path.name for path in (trainer.state_dir / "r").iterdir()} == {"before@2"}
        assert (await trainer.save(5, "after")).seq_id == 5, "its sequence does not know of it"
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        (trainer.state_dir / "r/@discarded-after@5").mkdir()  # as of a deletion that was killed
        assert await delete_one("after") == 1
        assert {path.name for path in (trainer.state_dir / "r").iterdir()} == {"before@2"}
        again = await trainer.create(base_model=str(folder))
        assert again.applied_seq_id == 2, "at the newest that is left"
        for field, bad in (("run_id", "a/b"), ("name", "before@2")):
            request = pb.DeleteStateRequest(**{"run_id": "r", "name": "n", field: bad})
            error = await trainer.refused(trainer.stub.DeleteState(request), "INVALID_REQUEST")
            assert error.metadata["field"] == field


async def test_states_behind_a_link_are_left_to_who_put_them_there(
    folder: Path, serve_trainer: Make, tmp_path: Path
) -> None:
    """deletion.py 4"""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "there")
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        elsewhere = tmp_path / "elsewhere"
        (trainer.state_dir / "r").rename(elsewhere)
        (trainer.state_dir / "r").symlink_to(elsewhere)
        for dry_run in (True, False):
            error = await trainer.refused(delete(trainer, "r", dry_run=dry_run), "NOT_READY")
            assert f"is a link to {elsewhere}; remove both by hand" in error.message
        assert len(list(elsewhere.iterdir())) == 1
        (trainer.state_dir / "r").unlink()
        assert await delete(trainer, "r") == pb.DeleteStatesResponse()


async def test_states_of_another_run_of_that_name_stay(
    folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """deletion.py 3: for a caller that says which run it means."""
    ours, another = (run_spec(base_model=str(folder), seed=seed) for seed in (0, 1))
    async with serve_trainer() as trainer:
        await two_states(trainer, "a", folder, make_samples)
        for dry_run in (True, False):
            call = delete(trainer, "a", spec=another, dry_run=dry_run)
            error = await trainer.refused(call, "RUN_CONFLICT")
            assert "of another run of that name: it was saved with seed = 0, not 1" in error.message
        assert below(trainer.state_dir) == {"a"}
        assert (await delete(trainer, "a", spec=ours, dry_run=True)).states == 2
        assert (await delete(trainer, "a", spec=ours)).states == 2
        assert not below(trainer.state_dir)


async def test_states_from_before_it_was_made_longer_are_its_own(folder: Path, serve_trainer: Make) -> None:
    """deletion.py 3."""
    longer = run_spec(base_model=str(folder), total_steps=4, earlier_total_steps=[2])
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), total_steps=2)
        await trainer.save(1, "shorter")
        await trainer.stub.CreateRun(pb.CreateRunRequest(run_id="r", spec=longer))
        await trainer.save(2, "longer")
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        shorter = run_spec(base_model=str(folder), total_steps=2)
        await trainer.refused(delete(trainer, "r", spec=shorter), "RUN_CONFLICT")
        assert (await delete(trainer, "r", spec=longer)).states == 2


async def test_a_state_that_is_harmed_where_it_says_whose_it_is_goes(
    folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """deletion.py 3: also one without that, and its mark tells nothing."""
    async with serve_trainer() as trainer:
        for harmed in ("", None):
            saved = await two_states(trainer, "a", folder, make_samples)
            for state in saved:
                meta = Path(state.path) / META
                meta.unlink() if harmed is None else meta.write_text(harmed)
            other = run_spec(base_model=str(folder), seed=1)
            assert (await delete(trainer, "a", spec=other)).states == 2
            assert not below(trainer.state_dir)


async def test_an_open_run_of_another_spec_is_said_beforehand(folder: Path, serve_trainer: Make) -> None:
    """roster.py 6: it need not have saved a state."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), total_steps=2)
        longer = run_spec(base_model=str(folder), total_steps=4, earlier_total_steps=[2])
        for spec in (run_spec(base_model=str(folder), total_steps=2), longer):
            assert await delete(trainer, "r", spec=spec, dry_run=True) == pb.DeleteStatesResponse()
        other = run_spec(base_model=str(folder), total_steps=2, seed=1)
        error = await trainer.refused(delete(trainer, "r", spec=other, dry_run=True), "RUN_CONFLICT")
        assert "run r exists in this trainer with seed = 0, not 1" in error.message


async def test_a_spec_that_is_none_is_refused(serve_trainer: Make) -> None:
    async with serve_trainer() as trainer:
        call = delete(trainer, "r", spec=pb.RunSpec())
        assert (await trainer.refused(call, "INVALID_CONFIG")).metadata["key"] == "base_model"


@pytest.mark.parametrize("name", ["", "..", "a/b", "@deleted-a", "x" * 65])
async def test_what_is_no_run_is_refused(name: str, serve_trainer: Make) -> None:
    async with serve_trainer() as trainer:
        assert (await trainer.refused(delete(trainer, name), "INVALID_REQUEST")).metadata["field"] == "run_id"


async def test_what_a_kill_left_goes_when_the_trainer_starts(
    folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """deletion.py 2."""
    async with serve_trainer() as trainer:
        await two_states(trainer, "a", folder, make_samples)
        await two_states(trainer, "b", folder, make_samples)
    root = trainer.state_dir
    Deletion(root, StateStore(root, 2)).take_away("a")  # and no further
    (left,) = below(root) - {"b"}
    assert left.startswith("@deleted-a@")
    async with serve_trainer() as trainer:
        assert (await trainer.create("a", base_model=str(folder))).applied_seq_id == 0
        for _ in range(LOOKS):
            if left not in below(root):
                break
            await asyncio.sleep(0.05)
        assert below(root) == {"b"}
        assert (await trainer.create("b", base_model=str(folder))).applied_seq_id == 2


def test_the_next_deletion_deletes_what_was_left(tmp_path: Path) -> None:
    """deletion.py 2 and 3: of this run alone."""
    store = StateStore(tmp_path, 2)
    ours = Deletion(tmp_path, store)
    for run_id in ("a", "a", "ab"):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "file").write_text("x")
        ours.take_away(run_id)
    ours.clear("a")
    (rest,) = below(tmp_path)
    assert rest.startswith("@deleted-ab@")


#: For each line, a folder and a moment, a process that has the imports already; how it ended is printed.
KILLED = """
import os, sys
from pathlib import Path
told, sys.stdout = sys.stdout, sys.stderr  # what is logged is no exit code
from quartet_trainer import deletion, states
def deadly(done):
    def call(*args, **named):
        if next(steps) == at:
            os._exit(9)
        return done(*args, **named)
    return call
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        root, at, steps = Path(line.split()[0]), int(line.split()[1]), iter(range(99))
        Path.rename, os.fsync, os.unlink, os.rmdir = map(deadly, (Path.rename, os.fsync, os.unlink, os.rmdir))
        one = deletion.Deletion(root, states.StateStore(root, 2))
        one.take_away("a")
        one.clear("a")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=told, flush=True)
"""


def test_killed_at_any_moment_it_is_whole_or_gone(tmp_path: Path) -> None:
    """deletion.py 1: over every change of the disk."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdin is not None and dying.stdout is not None
        for at in range(99):
            root = tmp_path / str(at)
            (root / "a" / "s@1").mkdir(parents=True)
            for name in ("one", "two"):
                (root / "a" / "s@1" / name).write_text(name)
            print(root, at, file=dying.stdin, flush=True)
            code = int(dying.stdout.readline())
            assert code in (0, 9), at
            if (root / "a").exists():
                assert {one.name for one in (root / "a" / "s@1").iterdir()} == {"one", "two"}, at
                continue
            if code == 0:
                assert not below(root) and at >= 4, at
                return
            Deletion(root, StateStore(root, 2)).clear_all()
            assert not below(root), at
    raise AssertionError("it never came to its end")


async def test_a_disk_that_fails_is_said_and_nothing_is_lost(
    folder: Path, serve_trainer: Make, make_samples: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_trainer() as trainer:
        await two_states(trainer, "a", folder, make_samples)
        with monkeypatch.context() as away:

            def fails(*_: Any) -> None:
                raise OSError(5, os.strerror(5))

            away.setattr(deleting.Path, "rename", fails)
            error = await trainer.refused(delete(trainer, "a"), "NOT_READY")
            assert "the states of run a cannot be deleted: Input/output error" in error.message
        assert (await delete(trainer, "a")).states == 2
