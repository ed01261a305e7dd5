"""The model of any saved state: equal to what saving it with export_model writes; nothing is harmed by it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.export import main

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"served_dtype": "bfloat16"},
    "from scratch": {"from_scratch": True, "seed": 5},
    "adapter": {"lora": pb.LoraSpec(rank=3, alpha=5.0)},
}


@pytest.fixture
def states(tmp_path: Path, folder: Path, serve_trainer: Any, make_samples: Any) -> Callable[..., Any]:
    """A run's folder of states: "old", then "new", each with the model that the trainer itself exported."""

    async def make(kind: str = "whole") -> Path:
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(folder), **KINDS[kind])
            await trainer.one_step(1, make_samples())
            await trainer.save(4, "old", export=True)
            await trainer.one_step(5, make_samples(seed=1))
            await trainer.save(8, "new", export=True)
        return Path(trainer.state_dir) / "r"

    return make


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
async def test_it_is_what_the_trainer_exports_of_that_state(
    states: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await states(kind)
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
        assert [one.name for one in target.parent.iterdir()] == ["where"]
        shutil.rmtree(target)
    assert contents(run) == before


async def test_a_harmed_state_is_passed_over_and_refused_by_name(
    states: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await states()
    with (run / "new@8" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert main([str(run), str(tmp_path / "model")]) == 0
    assert contents(tmp_path / "model") == contents(run / "old@4" / "model")
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "other"), "--state", "new"]) == 2
    assert "is harmed: weights.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


async def test_what_cannot_be_exported_is_refused_in_a_sentence(
    states: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await states()

    def refused(*arguments: str) -> str:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, said
        return said

    assert "has no sound state" in refused(str(tmp_path / "nothing"), str(tmp_path / "model"))
    assert "no complete state 'other'; it has: old, new" in refused(
        str(run), str(tmp_path / "model"), "--state", "other"
    )
    taken = tmp_path / "taken"
    taken.mkdir()
    assert f"{taken} exists" in refused(str(run), str(taken))
    with gone(folder):
        assert "there is no folder" in refused(str(run), str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()
