"""--overwrite gives a folder to another run once that is accepted, and to none before, whatever happens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from planned_runs import accepted, planned, steps_of, with_steps
from quartet.cli import held, overwritten
from quartet.cli.attempt import taken
from quartet.cli.job import RECORD
from quartet.cli.overwritten import ASIDE, FAILED_LOGS
from quartet.config import ConfigError
from quartet.run.config import RunConfig

#: Of file operations, in all that an attempt does to a folder.
MOST_OPERATIONS = 60


class Killed(BaseException):
    """SIGKILL: nothing after it is done."""


@pytest.fixture
def folder(tmp_path: Path, config: RunConfig) -> Path:
    """That of a completed run."""
    with accepted(planned(config, tmp_path / "run")):
        for file in ("checkpoint/weights", "metrics.jsonl", "logs/trainer.log"):
            (tmp_path / "run" / file).parent.mkdir(exist_ok=True)
            (tmp_path / "run" / file).write_text("hours of work")
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    """But for the lock."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != held.LOCK)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_it_is_kept_until_the_next_run_is_accepted(folder: Path, config: RunConfig) -> None:
    before = contents(folder)
    with taken(planned(with_steps(config, 7), folder, overwrite=True)) as attempt:
        assert not (folder / "metrics.jsonl").exists() and (folder / RECORD).exists()
        assert contents(folder / ASIDE) == before
        attempt.accepted()
        assert sorted(contents(folder)) == ["run.json", "run.toml"]
    assert steps_of(folder) == (7, 7)


@pytest.mark.parametrize("ends", ["refused", "fails", "is stopped"])
def test_whatever_ends_it_before_gives_the_folder_back(ends: str, folder: Path, config: RunConfig) -> None:
    before = contents(folder)
    with (
        suppress(RuntimeError),
        taken(planned(with_steps(config, 7), folder, overwrite=True)) as attempt,
    ):
        (folder / "logs").mkdir()
        (folder / "logs" / "trainer.log").write_text("why it did not start")
        if ends == "refused":
            attempt.refused()
        if ends == "fails":
            raise RuntimeError
    assert attempt.put_back
    logged = {f"{FAILED_LOGS}/trainer.log": b"why it did not start"}
    assert contents(folder) == before | logged
    with accepted(planned(config, folder, resume=True)):
        assert contents(folder) == before, "the logs of the other are outdated"


def test_a_folder_whose_run_was_never_accepted_is_free(tmp_path: Path, config: RunConfig) -> None:
    """job.py 2."""
    run = tmp_path / "run"
    for steps in (5, 7):
        with taken(planned(with_steps(config, steps), run)) as attempt:
            (run / "logs").mkdir()
    assert steps_of(run) == (7, 7) and not attempt.put_back
    with taken(planned(with_steps(config, 7), run, resume=True)) as attempt:
        attempt.accepted()
    with pytest.raises(ConfigError, match="is not empty; add --resume"):
        planned(config, run)
    with taken(planned(config, tmp_path / "other")) as attempt:
        attempt.refused()
    assert not (tmp_path / "other").exists()


def test_a_refused_run_leaves_a_folder_that_cannot_be_deleted_as_it_found_it(
    tmp_path: Path, config: RunConfig
) -> None:
    """A link to a larger disk, here; a mount of a container is as little to be deleted."""
    there, folder = tmp_path / "there", tmp_path / "run"
    there.mkdir()
    folder.symlink_to(there)
    for steps in (5, 7):
        with taken(planned(with_steps(config, steps), folder)) as attempt:
            (folder / "logs").mkdir()
            attempt.refused()
        assert folder.is_symlink() and {one.name for one in there.iterdir()} <= {held.LOCK}


@contextmanager
def killed_after(operations: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So many file operations are done, and no more."""
    left = operations

    def counted(operation: Any) -> Any:
        def done(*arguments: Any, **settings: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return operation(*arguments, **settings)

        return done

    with monkeypatch.context() as patch, suppress(Killed):
        for name in ("rename", "rmdir", "mkdir", "unlink", "replace"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        for name in ("unlink", "rmdir", "rename"):  # as shutil.rmtree does it
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


@pytest.mark.parametrize("accepts", [False, True])
def test_a_kill_at_any_moment_loses_nothing(
    accepts: bool, folder: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overwritten.py 2: after it the next attempt that is refused gives back what there was, or, once the
    killed one was accepted, what that has."""
    before, other = contents(folder), with_steps(config, 7)
    whole = shutil.copytree(folder, folder.parent / "whole")
    for operations in range(MOST_OPERATIONS):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        was_accepted = survived = False
        with killed_after(operations, monkeypatch):
            with taken(planned(other, folder, overwrite=True)) as attempt:
                if accepts:
                    was_accepted = True  # from its first operation on
                    attempt.accepted()
            survived = True
        held_back = contents(folder)
        with suppress(ConfigError), taken(planned(config, folder, "next", overwrite=True)) as attempt:
            attempt.refused()
        now = {name: of for name, of in contents(folder).items() if not name.startswith(FAILED_LOGS)}
        if was_accepted:
            assert now == before or now.get(RECORD) == held_back.get(RECORD), operations
        else:
            assert now == before, operations
        if survived:
            return
    pytest.fail("it takes more operations")


def test_what_is_half_deleted_is_not_put_back(folder: Path, config: RunConfig) -> None:
    (folder / overwritten._GONE).mkdir()
    (folder / overwritten._GONE / "half").touch()
    with taken(planned(with_steps(config, 7), folder, overwrite=True)) as attempt:
        attempt.refused()
    assert not (folder / overwritten._GONE).exists() and (folder / "metrics.jsonl").exists()
