"""`quartet sft`: the validation set, and the lines that tell of it."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli.__main__ import main
from quartet.cli.points import point_of
from quartet.cli.sft import command
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.metrics import step_line, step_row, validation_line, validation_row
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.validation import Measured, Validation, repeated
from quartet.config import ConfigError
from quartet.errors import LOST_STATUS, STATUS_KEY, QuartetError, refused, to_status
from quartet.run.sft import MeasureConfig, SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from quartet.v1.trainer_service_pb2 import (
    ForwardBackwardResponse,
    ForwardRequest,
    ForwardResponse,
    OptimStepResponse,
)
from sft_chats import shelved

MEASURES = MeasureConfig(before=False, after=False, interval=2)


@pytest.fixture
def check(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`check(data, ...)`: the exit code of a dry run, for which the trainer's configuration is good."""

    async def accepts(specs: object) -> None:
        """It would."""

    monkeypatch.setattr(command, "check", accepts)

    def run(data: Path, *more: str) -> int:
        return main(["sft", "--model", str(chat_model), "--data", str(data), *more, "--dry-run"])

    return run


def chats(file: Path, *answers: str) -> Path:
    """A file with a chat for each."""
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def samples(*tokens: int) -> Shelf:
    """One of so many tokens, but the first covered, for each."""
    return shelved(
        Sample(token_ids=range(count), spans=[PolicySpan(start=1, length=count - 1)]) for count in tokens
    )


class Scores:
    """A trainer that finds every token as likely as e**-(its place), and the first the most likely; it notes
    what it is sent at once."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def Forward(self, frames: Iterator[ForwardRequest], timeout: float) -> Any:
        start, *middle, last = frames
        got = [one.sample for frame in middle for one in frame.batch.samples]
        assert start.start.run_id == "sft" and not start.start.HasField("policy_version")
        assert start.start.tells_best
        assert last.commit.sample_count == len(got)
        self.sent.append(len(got))
        answers = [
            ForwardResponse(
                logprobs=[-float(place) for place in range(one.spans[0].length)],
                best=[place == 0 for place in range(one.spans[0].length)],
            )
            for one in got
        ]
        left = iter([*answers, grpc.aio.EOF])

        async def read() -> Any:
            return next(left)

        return types.SimpleNamespace(read=read, cancel=lambda: None, add_done_callback=lambda ended: None)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
async def test_promises_1_and_3_every_token_counts_once_however_the_set_is_sent(batch_size: int) -> None:
    scores = Scores()
    found = await Validation(samples(2, 4, 3), MEASURES, 4, Batching(batch_size)).measured(scores, 60.0)
    expected = Measured(loss=(0 + (0 + 1 + 2) + (0 + 1)) / 6, accuracy=3 / 6, tokens=6)
    assert found == expected, "no mean of means"
    assert found.perplexity == pytest.approx(math.exp(4 / 6))
    assert max(scores.sent) <= batch_size and sum(scores.sent) == 3


class Refused:
    """A trainer's call that is refused while a part of the set is written, as grpc.aio shows it."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    async def details(self) -> str:
        return "the first is refused"

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        status = to_status(refused("samples[0]", 1, "the model takes less"))
        return grpc.aio.Metadata((STATUS_KEY, status.SerializeToString()))

    async def read(self) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, LOST_STATUS)

    def cancel(self) -> None:
        """It has ended."""


async def test_why_the_trainer_refused_it_is_told_also_while_it_is_sent() -> None:
    """And not that gRPC lost why."""
    validation = Validation(samples(3), MEASURES, 10, Batching(1))
    with pytest.raises(QuartetError, match=r"samples\[0\] = 1 is refused; the model takes less"):
        await validation.measured(types.SimpleNamespace(Forward=lambda *_, **__: Refused()), 5.0)


@given(steps=st.integers(1, 30), interval=st.integers(0, 40), before=st.booleans(), after=st.booleans())
def test_it_is_measured_as_a_run_is_evaluated(steps: int, interval: int, before: bool, after: bool) -> None:
    when = MeasureConfig(before=before, after=after, interval=interval)
    validation = Validation(samples(2), when, steps, Batching(1))
    due = [done for done in range(steps + 1) if validation.is_due(done)]
    between = list(range(interval, steps, interval)) if interval else []
    assert due == [0] * before + between + [steps] * after
    assert validation.is_ever_due is bool(due)
    assert not Validation(Shelf(), when, steps, Batching(1)).is_ever_due
    passes = Validation(samples(2), when, steps, Batching(1), [1, 5])
    assert all(passes.is_due(done) for done in (1, 5) if done < steps)


def test_keys_of_a_measurement_without_a_set_are_refused() -> None:
    for given_keys, told in (({"interval": 3}, "eval.interval = 3"), ({"after": True}, "eval.after = true")):
        with pytest.raises(ValueError, match=f"{told} has nothing to measure; set validation to a file"):
            SftConfig(model="m", data="d", eval=given_keys)
    assert SftConfig(model="m", data="d", validation="v", eval={"interval": 3}).eval.interval == 3


def test_what_is_found_is_said_and_repeated_chats_are_counted(
    tmp_path: Path, check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = chats(tmp_path / "a", "x", "y", "z"), chats(tmp_path / "b", "y", "w" * 200, "z", "q", "y")
    assert check(data, "--validation", str(file), "--max-tokens", "100") == 0
    said, _, _ = capsys.readouterr().out.partition("\n\n")
    first, *others = said.splitlines()
    assert first.startswith("# 3 chats, ")
    assert others == [
        "# validation: 4 chats, 8 tokens to measure, 1 left out as too long",
        "# validation: 3 of its chats are among those to learn, so its loss tells less of others",
    ]


def test_both_files_are_looked_at_before_anything_starts(
    tmp_path: Path, check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "a", tmp_path / "b"
    data.write_text("{")
    file.write_text('{"messages": []}')
    assert check(data, "--validation", str(file)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {data}, line 1: it is no JSON")
    assert second.startswith(f"  also: {file}, line 1: messages is []")
    good = chats(tmp_path / "c", "x")
    assert check(good, "--validation", str(tmp_path / "none")) == 2
    assert f"validation = {str(tmp_path / 'none')!r} cannot be read" in capsys.readouterr().err
    assert check(good, "--validation", str(good), "--max-tokens", "1") == 2
    assert f"also: validation = {str(good)!r} has no chat of at most" in capsys.readouterr().err
    file.write_text("\n")
    assert check(good, "--validation", str(file)) == 2
    assert capsys.readouterr().err == f"error: validation = {str(file)!r} has no chat\n", "nor a longer one"


def test_a_set_that_is_never_measured_is_refused(
    tmp_path: Path, check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = chats(tmp_path / "a", "x", "y")
    never = ["--max-steps", "4", "--no-eval.before", "--no-eval.after", "--eval.interval"]
    assert check(data, "--validation", str(data), *never, "4") == 2
    assert "is never measured in 4 steps" in (error := capsys.readouterr().err)
    assert error.endswith("set eval.after to true, or eval.interval from 1 to 3\n")
    assert check(data, "--validation", str(data), *never, "3") == 0


def test_chats_that_the_model_cannot_take_are_refused_before_anything_starts(
    chat_model: Path, tmp_path: Path
) -> None:
    most = json.loads((chat_model / "config.json").read_text())["max_position_embeddings"]
    file = chats(tmp_path / "a", "x", "y" * (most + 1))
    with pytest.raises(
        ConfigError, match=f"the model takes {most} .*; set max_tokens to {most}, which"
    ) as told:
        read_chats(file, chat_model, ("assistant",), 10 * most, "validation")
    assert str(told.value).startswith(f"validation = {str(file)!r} has a chat of ")
    assert read_chats(file, chat_model, ("assistant",), most, "validation").left_out == 1


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("--eval-interval", "it is called 'eval.interval' here"),
        ("--eval.steps", "it is called 'eval.interval' here"),
        ("--eval-dataset", "it is called 'validation' here"),
        ("--lora-rank", "it is called 'lora.r' here"),
        ("--num-train-epochs", "it is called 'epochs' here"),
        ("--per-device-train-batch-size", "set 'batch_size', the chats of an optimizer step"),
        ("--tokens-per-batch", "it is called 'batch_tokens' here"),
        ("--packing-strategy", "set 'packing' to \"best_fit\""),
        ("--truncation-mode", "set 'overlong' to \"cut\""),
        ("--assistant-only-loss", "set 'learns' to"),
        ("--report-to", "set 'wandb.project'"),
        ("--eval.intervall", "did you mean 'eval.interval'?"),
    ],
)
def test_keys_of_others_are_refused_by_their_names_here(
    tmp_path: Path, check: Any, capsys: pytest.CaptureFixture[str], key: str, told: str
) -> None:
    assert check(tmp_path, key, "3") == 2
    assert told in capsys.readouterr().err


def test_lines_are_in_order_by_their_events_and_have_a_runs_names() -> None:
    done = ForwardBackwardResponse(loss=0.5, tokens=10, loss_tokens=4, diagnostics={"entropy": 2.0})
    stepped = OptimStepResponse(grad_norm=1.5, learning_rate=1e-3)
    rows = [validation_row(0, Measured(1.0, 0.5, 6), 0.1)]
    for step in (1, 2):
        rows += [step_row(step, done, stepped, 2.0), validation_row(step, Measured(0.25 / step, 0.5, 6), 0.1)]
    points = [point_of(row) for row in rows]
    assert [point.number for point in points] == sorted({point.number for point in points}) and points[
        0
    ].number
    assert [point.step for point in points] == [0, 1, 1, 2, 2]
    assert points[1].values == {
        "step": 1,
        "train/loss": 0.5,
        "train/tokens": 10,
        "train/loss_tokens": 4,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 1.5,
        "train/skipped_steps": 0,
        "train/entropy": 2.0,
        "time/step_s": 2.0,
        "tokens_per_second": 5.0,
    }
    assert points[2].values["val/loss"] == 0.25 and points[2].values["val/loss_tokens"] == 6
    assert points[2].values["val/perplexity"] == math.exp(0.25)
    assert points[2].values["val/token_accuracy"] == 0.5
    line = validation_line(1, 2, Measured(0.25, 0.5, 6))
    assert line.endswith("loss 0.2500  perplexity 1.284  token accuracy 50.0%")


def test_promise_2_what_is_no_number_is_no_part_of_a_line() -> None:
    done, stepped = ForwardBackwardResponse(loss=math.nan), OptimStepResponse(skipped_nonfinite=True)
    row = step_row(1, done, stepped, 1.0)
    assert "train/loss" not in row and row["train/skipped_steps"] == 1
    assert "lower learning_rate" in step_line(1, 2, done, stepped, 1.0)
    hopeless = Measured(1e4, 0.0, 1)
    row = validation_row(1, hopeless, 1.0)
    assert hopeless.perplexity == math.inf and "val/perplexity" not in row and row["val/loss"] == 1e4
    json.loads(json.dumps(row, allow_nan=False))


def test_repeated_chats_are_those_that_are_the_same_token_for_token() -> None:
    assert repeated(samples(2, 3, 3), samples(3, 5)) == 2
