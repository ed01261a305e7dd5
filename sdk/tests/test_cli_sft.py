"""`quartet sft`: what the trainer is asked for, and how the command ends."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import main
from quartet.cli.sft import command, steps
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.place import taken
from quartet.cli.sft.requests import FRAME_BYTES, frames, run_spec
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.steps import Refused, Training
from quartet.cli.sft.validation import Validation
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.run.sft import MeasureConfig, SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import CHAT, sample, written


def test_steps_and_schedule(tmp_path: Path) -> None:
    config = SftConfig(model="m", data=tmp_path, epochs=2.0, batch_size=8, warmup_steps=3)
    assert config.steps(40) == 10 and run_spec(config, 10).optimizer.total_steps == 10
    assert SftConfig(model="m", data=tmp_path, batch_size=64).steps(10) == 1
    for epochs in (1e12, 1e308):
        with pytest.raises(ConfigError, match="at most 4294967295 can be counted"):
            SftConfig(model="m", data=tmp_path, epochs=epochs).steps(400)
    with pytest.raises(ValueError, match="give one of the two"):
        SftConfig(model="m", data=tmp_path, epochs=2.0, max_steps=3)
    longest = SftConfig(model="m", data=tmp_path, warmup_steps=2**32 - 2)
    assert run_spec(longest, 8).optimizer.total_steps == 2**32 - 1
    with pytest.raises(ValueError, match="warmup_steps"):
        SftConfig(model="m", data=tmp_path, warmup_steps=2**32 - 1)


def test_an_adapter_is_asked_for_as_by_a_run(tmp_path: Path) -> None:
    table = {"enabled": True, "r": 4, "alpha": 8.0, "use_rslora": True, "publish": "merged"}
    config = SftConfig(model="m", data=tmp_path, lora=table | {"modules_to_save": ["norm"]})
    asked = run_spec(config, 10).lora
    assert (asked.rank, asked.alpha, asked.rslora, list(asked.modules_to_save)) == (4, 8.0, True, ["norm"])
    assert not run_spec(SftConfig(model="m", data=tmp_path), 10).HasField("lora")
    with pytest.raises(ValueError, match="no part of a served adapter"):
        SftConfig(model="m", data=tmp_path, lora={"enabled": True, "modules_to_save": ["norm"]})
    with pytest.raises(ValueError, match="r is set, and the table is off"):
        SftConfig(model="m", data=tmp_path, lora={"r": 4})
    for said, why in (
        (
            {"initial_adapter": "a"},
            "initial_adapter is set, .* enabled = true beside it, or remove the table",
        ),
        ({"initial_adapter": "a", "r": 4}, "r, initial_adapter are set, .* beside them, or remove the table"),
    ):
        with pytest.raises(ValueError, match=why):
            SftConfig(model="m", data=tmp_path, lora=said)


def test_a_batch_is_the_mean_over_what_is_learned(chat_model: Path) -> None:
    first, *middle, last = frames([sample(chat_model, "assistant")] * 3, 5)
    covered = sum(span.length for span in sample(chat_model, "assistant").spans)
    assert (first.start.seq_id, first.start.normalizer) == (5, 3 * covered)
    assert sum(len(one.batch.samples) for one in middle) == last.commit.sample_count == 3


def test_many_short_samples_are_framed_as_fast_as_they_are_written() -> None:
    """In frames of 1 MiB or so, whose size is known without counting them anew for each. What is long is
    alone."""
    many = [Sample(token_ids=range(200), spans=[PolicySpan(start=1, length=199)])] * 10_000
    began = time.process_time()
    written = sum(len(one.SerializeToString()) for one in many)
    once = time.process_time() - began
    _, *middle, last = frames(many, 1)
    assert time.process_time() - began < 100 * once
    assert last.commit.sample_count == sum(len(one.batch.samples) for one in middle) == len(many)
    sizes = [one.ByteSize() for one in middle]
    assert len(sizes) == 1 + written // FRAME_BYTES and max(sizes) < 1.25 * FRAME_BYTES
    long = Sample(token_ids=[9999] * FRAME_BYTES, spans=many[0].spans)
    assert [len(one.batch.samples) for one in frames([*many[:9], long, many[0]], 1)][1:-1] == [9, 1, 1]


def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--model", str(tmp_path / "absent"), "--data", "x.jsonl"]) == 2
    assert "neither a folder here nor" in capsys.readouterr().err


def test_an_adapter_is_no_model_to_begin_with(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chat_model / "adapter").mkdir()
    (chat_model / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["sft", "--model", str(chat_model / "adapter"), "--data", "x.jsonl"]) == 2
    told = f"it is an adapter; name the folder of a whole model, such as {str(chat_model)!r}"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "end",
    [OSError(errno.ENOSPC, "No space left on device"), QuartetError("NOT_READY", "the trainer is away")],
)
def test_whatever_ends_it_says_how_to_go_on(
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: Exception,
) -> None:
    async def ends(*given: object) -> None:
        raise end

    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", ends)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    arguments = ["--model", str(chat_model), "--data", str(data), "--output-dir", str(output)]
    assert main(["sft", *arguments]) == 1
    kept, error = capsys.readouterr().err.splitlines()
    assert kept.startswith(f"go on with: quartet sft --output-dir {output} --resume (from the newest")
    assert error in ("error: No space left on device", "error: NOT_READY: the trainer is away")


async def test_a_large_model_has_time_to_load(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    async def still_loading(call: object, request: object, *, timeout_s: float, **_: object) -> None:
        allowed.append(timeout_s)
        raise QuartetError("NOT_READY", "the model is being loaded")

    monkeypatch.setattr(steps, "unary", still_loading)
    config = SftConfig(model=str(chat_model), data=tmp_path)
    with pytest.raises(QuartetError):
        await Training(
            Mock(), config, Shelf(), Validation(Shelf(), MeasureConfig(), 1, Batching(1)), tmp_path, Mock()
        ).opened()
    assert allowed == [1800.0], "what the orchestrator allows"


async def test_what_the_trainer_does_not_take_was_not_begun(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(call: object, request: object, **_: object) -> None:
        raise QuartetError("INVALID_CONFIG", "lora.rank = 4 is refused: set 8", key="lora.rank", value="4")

    monkeypatch.setattr(steps, "unary", refuses)
    config = SftConfig(model=str(chat_model), data=written(tmp_path, {"messages": CHAT}))
    training = Training(
        Mock(), config, Shelf(), Validation(Shelf(), MeasureConfig(), 1, Batching(1)), tmp_path, Mock()
    )
    with pytest.raises(Refused, match=r"^lora\.r = 4 is refused: set 8$"):
        await training.opened()


def test_data_that_changed_while_they_were_read_are_not_trained_on(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"

    def meanwhile(*_: object) -> list[str]:
        """The data were read before what is in them is told."""
        data.write_bytes(data.read_bytes() * 2)
        return []

    monkeypatch.setattr(command, "told_of", meanwhile)
    assert main(["sft", "--model", str(chat_model), "--data", str(data), "--output-dir", str(output)]) == 2
    assert "changed while it was read; begin again" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_refused_run_takes_its_new_folder_with_it(
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resume: bool,
) -> None:
    async def refuses(*given: object) -> None:
        raise Refused("lora.target_modules = 'q' is refused")

    async def accepts(specs: object) -> None:
        """The trainer's configuration."""

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", refuses)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    if resume:
        config = SftConfig(model=str(chat_model), data=data)
        with taken(output, config, resume=False):
            pass
    arguments = ["--model", str(chat_model), "--data", str(data), "--output-dir", str(output)]
    assert main(["sft", *arguments, *(["--resume"] if resume else [])]) == 2
    assert capsys.readouterr().err == "error: lora.target_modules = 'q' is refused\n", "nothing was done"
    assert output.exists() is resume
