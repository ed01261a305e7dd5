"""The model of any saved state: equal to what saving it with export_model writes; nothing is harmed by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.export import REFUSALS, main
from quartet_trainer.states import StateStore
from quartet_trainer.trained import WholeModel
from safetensors import SafetensorError

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"served_dtype": "bfloat16"},
    "from scratch": {"from_scratch": True, "seed": 5},
    "adapter": {"lora": pb.LoraSpec(rank=3, alpha=5.0)},
}


@pytest.fixture
def states(tmp_path: Path, folder: Path, serve_trainer: Any, make_samples: Any) -> Callable[..., Any]:
    """A run's folder of states: "old", then "new", each with the model that the trainer itself exported."""

    async def make(kind: str) -> Path:
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(folder), **KINDS[kind])
            await trainer.one_step(1, make_samples())
            await trainer.save(4, "old", export=True)
            await trainer.one_step(5, make_samples(seed=1))
            await trainer.save(8, "new", export=True)
        return Path(trainer.state_dir) / "r"

    return lambda kind="whole": asyncio.run(make(kind))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@contextlib.contextmanager
def gone(folder: Path) -> Iterator[None]:
    """A folder is elsewhere for a while."""
    away = folder.rename(folder.with_name("away"))
    try:
        yield
    finally:
        away.rename(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_trainer_exports_of_that_state(
    states: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """export.py 1 and 3."""
    run = states(kind)
    before = contents(run)
    target = tmp_path / "some" / "where"
    for where, more, name in (
        (run, (), "new@8"),
        (run, ("--state", "old"), "old@4"),
        (run / "old@4", (), "old@4"),
    ):
        assert main([str(where), str(target), *more]) == 0
        assert f"state {name.partition('@')[0]}," in capsys.readouterr().out
        assert contents(target) == contents(run / name / "model")
        modes = {file.stat().st_mode for file in target.rglob("*") if file.is_file()}
        assert modes == {(target / "config.json").stat().st_mode}, "whoever may read it may read its weights"
        assert [one.name for one in target.parent.iterdir()] == ["where"]
        shutil.rmtree(target)
    assert contents(run) == before


def test_a_harmed_state_is_passed_over_and_refused_by_name(
    states: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = states()
    with (run / "new@8" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert main([str(run), str(tmp_path / "model")]) == 0
    assert contents(tmp_path / "model") == contents(run / "old@4" / "model")
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "other"), "--state", "new"]) == 1
    assert "is harmed: weights.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_of_several_versions_the_first_that_is_kept_and_sound_is_taken(
    states: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = states()

    def exported(versions: str) -> list[str]:
        """What it says, but for the log, which tests have on stdout."""
        assert main([str(run), str(tmp_path / versions), "--versions", versions]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if " [" not in line]

    first, *more = exported("1,2")
    assert first.endswith("the model of state old, policy version 1") and not more
    assert contents(tmp_path / "1,2") == contents(run / "old@4" / "model")
    first, second = exported("7,2,1")
    assert first.endswith("the model of state new, policy version 2")
    assert second.startswith(
        "of policy version 7 no sound state is kept; in the next run set ckpt.keep_interval"
    )
    (harmed := run / "new@8" / "run.json").write_text(harmed.read_text() + " ")
    first, second = exported("2,1")
    assert first.endswith("the model of state old, policy version 1")
    assert second.startswith("of policy version 2 no sound state is kept")


def test_a_state_that_is_pruned_while_it_is_read_makes_way_for_a_newer_one(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """export.py 1."""
    run = states()
    kept = shutil.copytree(run / "new@8", tmp_path / "kept")
    shutil.rmtree(run / "new@8")
    original = StateStore.read
    read = []

    def pruned_once(store: StateStore, info: Any) -> Any:
        read.append(info.name)
        if len(read) == 1:  # the trainer saves the next one, and prunes this
            shutil.copytree(kept, run / "new@8", dirs_exist_ok=True)
            shutil.rmtree(info.path)
        return original(store, info)

    monkeypatch.setattr(StateStore, "read", pruned_once)
    assert main([str(run), str(tmp_path / "model")]) == 0
    assert read == ["old", "new"]
    assert contents(tmp_path / "model") == contents(kept / "model")
    read.clear()
    assert main([str(run), str(tmp_path / "other"), "--state", "new"]) == 2
    assert "state new was pruned while it was read; ask again" in capsys.readouterr().err


#: Processes that begin at once: forks of one that has imported torch, which each else did at another time.
#: Its lines are [TARGET, bytes that a file may have or 0, STATE...]; it tells [code, text] of each state.
EXPORTING = """
import json, os, resource, sys
from quartet_trainer.export import main
for line in sys.stdin:
    target, room, *states = json.loads(line)
    gate, opened = os.pipe()
    begun = []
    for state in states:
        heard, said = os.pipe()
        if not (pid := os.fork()):
            os.close(opened)
            os.dup2(said, 1)
            os.dup2(said, 2)
            if room:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            os.read(gate, 1)  # until nobody can write there
            code = main([state, target])
            sys.stderr.flush()
            os._exit(code)
        os.close(said)
        begun.append((pid, heard))
    os.close(opened)
    os.close(gate)
    texts = [os.fdopen(heard).read() for _, heard in begun]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in begun]
    print(json.dumps(list(zip(codes, texts))), flush=True)
"""


@pytest.fixture(scope="module")
def exported() -> Iterator[Callable[..., list[tuple[int, str]]]]:
    """By other processes, which begin at once: with what each ends, and what it says."""
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", EXPORTING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def export(target: Path, *states: Path, room: int = 0) -> list[tuple[int, str]]:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([str(target), room, *map(str, states)]), file=process.stdin, flush=True)
            return [(code, text) for code, text in json.loads(process.stdout.readline())]

        yield export


def test_of_many_that_write_one_target_one_does(states: Any, tmp_path: Path, exported: Any) -> None:
    """export.py 2."""
    run = states()
    names = ["old@4", "new@8"] * 3
    ended = exported(tmp_path / "model", *(run / name for name in names))
    (winner,) = [name for name, (code, _) in zip(names, ended, strict=True) if code == 0]
    assert contents(tmp_path / "model") == contents(run / winner / "model")
    texts = [text for code, text in ended if code]
    assert len(texts) == 5 and all("exists" in text or "meanwhile" in text for text in texts), texts
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "states"]


@pytest.mark.parametrize("failure", [SafetensorError("No space left"), KeyboardInterrupt()])
def test_what_ends_in_the_middle_leaves_nothing(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """export.py 2."""
    run = states()

    def fail(self: Any, source: Path, target: Path, *more: Any) -> None:
        target.mkdir()
        (target / "half").write_text("x")
        raise failure

    monkeypatch.setattr(WholeModel, "export", fail)
    assert main([str(run), str(tmp_path / "model")]) == (130 if isinstance(failure, KeyboardInterrupt) else 1)
    assert [one.name for one in tmp_path.iterdir()] == ["states"]
    if isinstance(failure, SafetensorError):
        assert "cannot be written: No space left; make room there" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused_in_a_sentence(
    states: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = states()
    target = tmp_path / "model"

    def refused(*arguments: str | Path) -> str:
        assert main([*map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, said
        assert not any(reason in said for reason in REFUSALS), "nobody called anything"
        return said

    assert "has no saved state; a run saves one after every" in refused(tmp_path / "nothing", target)
    assert "no complete state 'other'; it has: old (version 1), new (version 2)" in refused(
        run, target, "--state", "other"
    )
    assert "no state of policy version 5, 7 is kept; there are: new (version 2), old (version 1)" in refused(
        run, target, "--versions", "5,7"
    )
    for which in (["--state", "old"], ["--versions", "1"]):
        assert "is one state already" in refused(run / "new@8", target, *which)
    assert "it is among the states" in refused(run, run / "model")
    assert "it is among the states" in refused(run / "new@8", run / "old@4" / "more")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for taken in (folder, tmp_path / "dangling"):
        assert "it exists" in refused(run, taken)
    with gone(folder):
        assert "there is no folder" in refused(run, target)
    config = (folder / "config.json").read_text()
    wider = json.loads(config) | {"intermediate_size": 128}
    try:
        (folder / "config.json").write_text(json.dumps(wider))
        assert "weight of [32, 128], which is of [32, 64]" in refused(run, target)
    finally:
        (folder / "config.json").write_text(config)
    assert not target.exists()


@pytest.mark.parametrize("change", [{"learning_rat": 1.0}, None])
def test_a_state_of_another_release_is_refused_in_a_sentence(
    states: Any, tmp_path: Path, change: dict[str, float] | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = states()
    original = StateStore.read

    def other(store: StateStore, info: Any) -> Any:
        content = original(store, info)
        if change is None:
            del content.meta["trained"]
        else:
            content.meta["spec"] |= change
        return content

    monkeypatch.setattr(StateStore, "read", other)
    assert main([str(run), str(tmp_path / "model")]) == 2
    assert "another release of Quartet wrote it" in capsys.readouterr().err


def test_a_disk_that_takes_no_more_is_told_with_a_remedy(states: Any, tmp_path: Path, exported: Any) -> None:
    """By a limit of the size of files, which is told as a full disk is."""
    run, target = states(), tmp_path / "model"
    for room in (1, 4096):
        ((code, said),) = exported(target, run, room=room)
        assert code == 1 and said.startswith("error: ") and said.count("\n") == 1, said
        assert "ulimit -f" in said or "make room there" in said
    assert not target.exists() and not list(tmp_path.glob(".model.*"))
