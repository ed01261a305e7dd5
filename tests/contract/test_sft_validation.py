"""`quartet sft` beside a real trainer: it measures what the model says, and moves nothing by that."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.shown import Lines
from quartet.cli.sft.steps import Training
from quartet.cli.sft.validation import Validation
from quartet.kit.channel import connect
from quartet.run.sft import MeasureConfig, SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

VOCAB, STEPS = 96, 5
ADAPTER = {"enabled": True, "r": 4, "dropout": 0.5}
EVERY_STEP = MeasureConfig(interval=1)
OF_TIME = ("time", "time/step_s", "time/validation_s", "tokens_per_second")


def samples(count: int, seed: int) -> Shelf:
    """Ragged ones, with two covered parts each."""
    drawn, made = random.Random(seed), Shelf()
    for _ in range(count):
        first, second = drawn.randint(1, 6), drawn.randint(1, 9)
        ids = [drawn.randrange(VOCAB) for _ in range(4 + first + 3 + second)]
        spans = [PolicySpan(start=4, length=first), PolicySpan(start=7 + first, length=second)]
        made.put(Sample(token_ids=ids, spans=spans))
    return made


@pytest.fixture
def train(tmp_path: Path, small_qwen3: Path, serving_trainer: Callable[..., Any]) -> Callable[..., Any]:
    """`await train(name, validation, when)`: all steps on a trainer of its own; rows, last state, model."""

    async def run(
        name: str, validation: Shelf, when: MeasureConfig = EVERY_STEP, **keys: Any
    ) -> tuple[list[dict[str, Any]], Path, Path]:
        config = SftConfig(
            **{"model": str(small_qwen3), "data": tmp_path, "max_steps": STEPS, "batch_size": 4}
            | {"learning_rate": 1e-2, "microbatch_tokens": 40, "ckpt": {"interval": 2}}
            | keys
        )
        output = tmp_path / name
        output.mkdir()
        async with (
            serving_trainer(tmp_path / f"{name}-states") as address,
            connect(address) as channel,
        ):
            stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
            measured = Validation(validation, when, config.steps(0), Batching.of(config))
            shown = Lines(config.steps(0))
            training = Training(stub, config, samples(10, seed=1), measured, output, shown)
            model = await training.finished(await training.opened(), asyncio.Event())
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        rows = [{key: value for key, value in row.items() if key not in OF_TIME} for row in rows]
        return rows, model.parent, model

    return run


def contents(state: Path) -> dict[str, bytes]:
    """Weights, moments, and whatever else a state holds."""
    files = {one.name: one.read_bytes() for one in sorted(state.glob("*.safetensors"))}
    assert any("weights" in name for name in files) and any("moments" in name for name in files), files.keys()
    return files


@pytest.mark.parametrize("lora", [{"enabled": False}, ADAPTER])
async def test_promise_2_training_is_bit_identical_with_and_without(
    train: Callable[..., Any], lora: dict[str, Any]
) -> None:
    """Dropout draws too: a number that measuring drew would show."""
    plain_rows, plain_state, plain_model = await train("plain", Shelf(), lora=lora)
    rows, state, model = await train("measured", samples(9, seed=2), lora=lora)
    assert [row for row in rows if "train/loss" in row] == plain_rows and len(plain_rows) == STEPS
    assert [row["step"] for row in rows if "val/loss" in row] == list(range(STEPS + 1))
    assert contents(state) == contents(plain_state)
    exported = [(one / "model.safetensors").read_bytes() for one in (plain_model, model)]
    assert exported[0] == exported[1]


@pytest.mark.parametrize("lora", [{"enabled": False}, ADAPTER])
async def test_promise_1_the_loss_is_what_the_model_says_of_the_set(
    train: Callable[..., Any], small_qwen3: Path, lora: dict[str, Any]
) -> None:
    """By transformers alone, of the model before and of the one that was exported; dropout is off."""
    import torch
    from transformers import AutoModelForCausalLM

    validation = samples(9, seed=2)
    rows, _, exported = await train("measured", validation, lora=lora)
    measured = [row for row in rows if "val/loss" in row]
    for row, path in ((measured[0], small_qwen3), (measured[-1], exported)):
        model, values, best = AutoModelForCausalLM.from_pretrained(path).eval(), [], 0
        for one in validation:
            ids = torch.tensor([list(one.token_ids)])
            with torch.no_grad():
                logp = torch.log_softmax(model(ids).logits[0].double(), -1)
            for span in one.spans:
                places = range(span.start, span.start + span.length)
                values += [-float(logp[place - 1, ids[0, place]]) for place in places]
                best += sum(int(logp[place - 1].argmax()) == ids[0, place] for place in places)
        assert row["val/loss_tokens"] == len(values)
        assert row["val/loss"] == pytest.approx(sum(values) / len(values), abs=2e-5)
        assert row["val/token_accuracy"] == pytest.approx(float(best) / len(values), abs=1e-9)
    assert measured[0]["val/loss"] != pytest.approx(measured[-1]["val/loss"], abs=1e-2)


async def test_promise_1_it_is_the_loss_of_training_on_the_whole_set(train: Callable[..., Any]) -> None:
    rows, _, _ = await train("whole", samples(10, seed=1), batch_size=10)
    before, first = rows[0], rows[1]
    assert before["val/loss"] == pytest.approx(first["train/loss"], abs=1e-6)
    assert before["val/loss_tokens"] == first["train/loss_tokens"]
