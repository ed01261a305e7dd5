"""`quartet sft`: a trainer that is away, cannot go on, or was started again (steps.py 5)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from quartet.cli.sft import steps
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.steps import MAX_LOSSES, Training
from quartet.cli.sft.stopping import Stopped
from quartet.cli.sft.validation import Validation
from quartet.errors import QuartetError
from quartet.run.sft import MeasureConfig, SavingConfig, SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import shelved

SAMPLE = Sample(token_ids=[1, 2, 3], spans=[PolicySpan(start=1, length=2)])
FULL = "state step-2 cannot be written: make room there"


class Trainer:
    """Applies calls in their order, and comes back at its newest state once it was killed. Of each call, in
    which `fails` says so, that is raised first: nothing else comes of it."""

    def __init__(self) -> None:
        self.applied: int | None = None
        self.saved = 0
        self.fails: dict[int, list[QuartetError]] = {}
        self.opens_again = True  # once it was killed; else it imports torch for ever
        self.calls: list[int] = []

    def kill(self) -> None:
        self.applied = None

    async def unary(self, method: object, request: Any, **_: object) -> Any:
        if isinstance(request, pb.CreateRunRequest):
            if self.calls and not self.opens_again:
                await asyncio.sleep(60)
            self.applied = self.saved if self.applied is None else self.applied
            return pb.CreateRunResponse(run=pb.RunState(applied_seq_id=self.applied))
        seq_id = request[0].start.seq_id if isinstance(request, list) else request.seq_id
        if errors := self.fails.get(seq_id):
            if (error := errors.pop(0)).metadata.get("grpc_code"):
                self.kill()
            raise error
        if self.applied is None:
            raise QuartetError("RUN_UNKNOWN", "the run is not open here")
        assert seq_id == self.applied + 1
        self.applied = seq_id
        self.calls.append(seq_id)
        match request:
            case pb.SaveStateRequest():
                self.saved = seq_id
                return pb.SaveStateResponse(state=pb.SavedState(model_path="/model"))
            case pb.OptimStepRequest():
                return pb.OptimStepResponse()
            case _:
                return pb.ForwardBackwardResponse()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(steps, "unary", trainer.unary)
    monkeypatch.setattr(steps, "AGAIN_SECONDS", 0.0)
    return trainer


async def trained(folder: Path, *, ends: bool = False) -> tuple[Path, list[str]]:
    """A fine-tuning of five steps with a state after each second one: its model, and what was said. Where it
    `ends`, it is asked for that once it says something."""
    asked, display = asyncio.Event(), Mock()
    if ends:
        display.say.side_effect = lambda text: asked.set()
    config = SftConfig(model="m", data=folder, max_steps=5, batch_size=1, ckpt=SavingConfig(interval=2))
    validation = Validation(Shelf(), MeasureConfig(), 5, Batching(1))
    training = Training(Mock(), config, shelved([SAMPLE]), validation, folder, display)
    model = await training.finished(await training.opened(), asked)
    return model, [call.args[0] for call in display.say.call_args_list]


async def test_promise_5_a_trainer_that_was_killed_is_gone_on_with_and_a_full_disk_waited_for(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.fails = {
        5: [QuartetError("NOT_READY", FULL), QuartetError("NOT_READY", FULL)],  # the state behind step 2
        8: [QuartetError("NOT_READY", "Socket closed", grpc_code="UNAVAILABLE")],  # the fourth step
    }
    model, said = await trained(tmp_path)
    assert model == Path("/model")
    assert trainer.calls == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11, 12, 13]
    assert said == [
        f"the trainer answers and cannot go on, waiting for it: {FULL}",
        "the trainer is back",
        "the trainer is away, waiting for it: Socket closed",
        "the trainer was started again; what it had not saved is done once more",
        "going on after step 2/5",
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5], "promise 4"


async def test_promise_5_a_trainer_that_one_batch_kills_each_time_is_given_up(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.fails = {8: [QuartetError("RUN_UNKNOWN", "torn") for _ in range(MAX_LOSSES + 2)]}
    why = f"the trainer ended {MAX_LOSSES + 1} times without a step beyond 3; its log says why"
    with pytest.raises(QuartetError, match=why):
        await trained(tmp_path)
    assert len(trainer.fails[8]) == 1


async def test_promise_5_nobody_who_asks_for_the_end_waits_for_the_trainer(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.fails = {3: [QuartetError("NOT_READY", FULL) for _ in range(1000)]}
    with pytest.raises(QuartetError, match="make room there"):
        await trained(tmp_path, ends=True)
    assert len(trainer.fails[3]) == 998


async def test_promise_3_nor_for_one_that_opens_the_run_anew(trainer: Trainer, tmp_path: Path) -> None:
    trainer.fails, trainer.opens_again = {8: [QuartetError("RUN_UNKNOWN", "torn")]}, False
    with pytest.raises(Stopped) as stopped:
        await asyncio.wait_for(trained(tmp_path, ends=True), 30)
    assert stopped.value.done == 3


async def test_promise_5_what_does_not_pass_ends_it(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.fails = {3: [QuartetError("INVALID_REQUEST", "no")]}
    with pytest.raises(QuartetError, match="no"):
        await trained(tmp_path)
    trainer.fails = {3: [QuartetError("OVERLOADED", "the memory of the trainer does not reach")]}
    with pytest.raises(QuartetError, match="memory"):
        await trained(tmp_path)
    monkeypatch.setattr(steps, "PATIENCE_SECONDS", 0.0)
    trainer.fails = {3: [QuartetError("NOT_READY", FULL) for _ in range(1000)]}
    with pytest.raises(QuartetError, match="make room there"):
        await trained(tmp_path)
