"""Which states a run keeps: what its file says, and what is asked of the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli.__main__ import main
from quartet.cli.sft import steps
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.steps import Training
from quartet.cli.sft.validation import Validation
from quartet.run.config import parse_run
from quartet.run.learning import CheckpointConfig
from quartet.run.sft import MeasureConfig, SavingConfig, SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import Sample

RUN = 'model = "m"\n[[env]]\nid = "e"\n'


def test_states_are_kept_at_multiples() -> None:
    ckpt = parse_run(RUN + "[ckpt]\ninterval = 5\nkeep_last = 3\nkeep_interval = 20").ckpt
    assert [step for step in range(1, 61) if ckpt.keeps(step)] == [20, 40, 60]
    assert not any(CheckpointConfig().keeps(step) for step in range(1, 61))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.integers(0, 40), st.booleans())
def test_there_are_never_more_states_than_said(
    interval: int, keep_last: int, every: int, steps: int, closes: bool
) -> None:
    """As the trainer keeps them; one that is closed may have a state of any step."""
    ckpt = CheckpointConfig(interval=interval, keep_last=keep_last, keep_interval=every * interval or None)
    saved = [step for step in range(1, steps + 1) if step % interval == 0 or step == steps]
    there: list[tuple[int, bool]] = []
    for number, step in enumerate(saved):
        there.append((step, ckpt.keeps(step)))
        if closes and number == len(saved) // 2:
            there.append((step, False))
        there = [one for at, one in enumerate(there) if one[1] or at >= len(there) - keep_last]
        assert len(there) <= ckpt.most_states(steps)


async def test_a_fine_tuning_keeps_states_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def answers(call: object, request: Any, **_: object) -> Any:
        asked.append(request)
        match request:
            case pb.CreateRunRequest():
                return pb.CreateRunResponse()
            case pb.SaveStateRequest():
                return pb.SaveStateResponse(state=pb.SavedState(model_path="/model"))
            case pb.OptimStepRequest():
                return pb.OptimStepResponse()
            case _:
                return pb.ForwardBackwardResponse()

    monkeypatch.setattr(steps, "unary", answers)
    ckpt = SavingConfig(interval=2, keep_last=3, keep_interval=4)
    config = SftConfig(model="m", data=tmp_path, max_steps=8, batch_size=1, ckpt=ckpt)
    sample = Sample(token_ids=[1, 2, 3])
    sample.spans.add(start=1, length=2)
    (shelf := Shelf()).put(sample)
    seen = Mock(say=Mock(), step=Mock())
    training = Training(
        Mock(), config, shelf, Validation(Shelf(), MeasureConfig(), 8, Batching(1)), tmp_path, seen
    )
    assert await training.finished(await training.opened(), asyncio.Event()) == Path("/model")
    assert asked[0].keep_last == 3
    saved = [(one.name, one.keep) for one in asked if isinstance(one, pb.SaveStateRequest)]
    assert saved == [("step-2", False), ("step-4", True), ("step-6", False), ("final", True)]


def test_a_fine_tuning_says_itself_how_many_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_text("")
    words = ["sft", "--model", "m", "--data", str(tmp_path / "data.jsonl")]
    assert main([*words, "--output-dir", str(tmp_path / "out"), "--trainer.keep-last", "5"]) == 2
    assert "trainer.keep_last = 5 is for runs that do not say it" in capsys.readouterr().err
