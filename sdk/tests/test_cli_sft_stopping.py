"""`quartet sft`: ended by Ctrl-C (stopping.py), and gone on with by its folder alone (command.py 2 and 3)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import main
from quartet.cli.asked import ONE_WISH_SECONDS
from quartet.cli.sft import command, steps
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.steps import Training
from quartet.cli.sft.stopping import Stopped, heard, unless
from quartet.cli.sft.validation import Measured, Validation
from quartet.run.sft import MeasureConfig, SavingConfig, SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import CHAT, shelved, written

SAMPLE = Sample(token_ids=[1, 2, 3], spans=[PolicySpan(start=1, length=2)])


@pytest.fixture
def begin(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[SftConfig]]]:
    """Runs the command with a trainer that takes every run, and is stopped; also what was to be trained."""

    async def accepts(specs: object) -> None:
        """The trainer would."""

    asked: list[SftConfig] = []

    async def stops(config: SftConfig, *given: object) -> None:
        asked.append(config)
        raise Stopped(3)

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", stops)
    written(tmp_path, {"messages": CHAT})
    return lambda *words: (main(["sft", *words]), asked)


async def stopped_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> tuple[int | None, list[Any]]:
    """A fine-tuning of nine steps that is asked for its end in one of them: after how many it ended, and its
    calls."""
    requests: list[Any] = []
    end = asyncio.Event()

    async def answers(call: object, request: Any, **_: object) -> Any:
        requests.append(request)
        match request:
            case pb.SaveStateRequest():
                return pb.SaveStateResponse(state=pb.SavedState(model_path="/model"))
            case pb.OptimStepRequest():
                if sum(isinstance(one, pb.OptimStepRequest) for one in requests) == when:
                    end.set()
                return pb.OptimStepResponse()
            case _:
                return pb.ForwardBackwardResponse()

    monkeypatch.setattr(steps, "unary", answers)
    config = SftConfig(model="m", data=tmp_path, max_steps=9, batch_size=1, ckpt=SavingConfig(interval=4))
    validation = Validation(Shelf(), MeasureConfig(), 9, Batching(1))
    training = Training(Mock(), config, shelved([SAMPLE]), validation, tmp_path, Mock())
    try:
        await training.finished(0, end)
    except Stopped as stopped:
        return stopped.done, requests
    return None, requests


async def test_promise_1_it_ends_behind_the_step_under_way_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, requests = await stopped_in(tmp_path, monkeypatch, 6)
    assert done == 6 and isinstance(requests[-1], pb.CloseRunRequest)
    assert requests[-1].save_at_seq_id == 13, "two calls of each step, and the state behind the fourth"


async def test_promise_1_where_a_state_is_due_it_is_the_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, requests = await stopped_in(tmp_path, monkeypatch, 4)
    assert (done, requests[-1].name, requests[-1].seq_id) == (4, "step-4", 9)


async def test_promise_1_behind_the_last_step_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, requests = await stopped_in(tmp_path, monkeypatch, 9)
    assert done is None and requests[-1].name == "final"


async def test_promise_1_a_measurement_is_broken_off_and_done_by_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """steps.py 3: before the first step, and behind one, whose state is there."""
    requests: list[Any] = []

    async def answers(call: object, request: Any, **_: object) -> Any:
        requests.append(request)
        if isinstance(request, pb.SaveStateRequest):
            return pb.SaveStateResponse(state=pb.SavedState(model_path="/model"))
        return (
            pb.OptimStepResponse()
            if isinstance(request, pb.OptimStepRequest)
            else pb.ForwardBackwardResponse()
        )

    async def measured(validation: Validation, stub: object, timeout_s: float) -> Measured:
        moments.append(len(requests) // 2)
        if moments[-1] in lasting:
            asked.set()
            await asyncio.sleep(60)
        return Measured(0.5, 0.5, 1)

    monkeypatch.setattr(steps, "unary", answers)
    monkeypatch.setattr(Validation, "measured", measured)
    config = SftConfig(model="m", data=tmp_path, max_steps=6, batch_size=1, ckpt=SavingConfig(interval=6))
    validation = Validation(shelved([SAMPLE]), MeasureConfig(interval=3), 6, Batching(1))

    async def ended(done: int) -> int | None:
        training = Training(Mock(), config, shelved([SAMPLE]), validation, tmp_path, Mock())
        with pytest.raises(Stopped) as stopped:
            await asyncio.wait_for(training.finished(done, asked), 30)
        return stopped.value.done

    lasting, moments, asked = {0}, list[int](), asyncio.Event()
    assert (await ended(0), requests) == (None, [])
    lasting, moments, asked = {3}, [], asyncio.Event()
    assert (await ended(0), moments) == (3, [0, 3])
    assert isinstance(requests[-1], pb.CloseRunRequest) and requests[-1].save_at_seq_id == 6
    lasting, moments, asked = {3}, [], asyncio.Event()
    assert (await ended(3), moments) == (3, [3]), "first of all"
    lasting, moments = set(), []
    training = Training(Mock(), config, shelved([SAMPLE]), validation, tmp_path, Mock())
    assert await training.finished(3, asyncio.Event()) == Path("/model")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 3, 6]
    assert [row["step"] for row in rows if "train/tokens" in row] == [1, 2, 3, 4, 5, 6]
    moments.clear()
    training = Training(Mock(), config, shelved([SAMPLE]), validation, tmp_path, Mock())
    await training.finished(3, asyncio.Event())
    assert len(moments) == 1, "what was measured after step 3 is known"


async def test_promise_1_while_the_model_is_loading_it_ends_at_once() -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().call_soon(asked.set)
    with pytest.raises(Stopped) as stopped:
        await asyncio.wait_for(unless(asked, asyncio.sleep(60)), 30)
    assert stopped.value.done is None and "before its first step here" in stopped.value.told(Path("/o"))
    assert await unless(asyncio.Event(), asyncio.sleep(0, 5)) == 5
    with pytest.raises(ValueError, match="no"):
        await unless(asyncio.Event(), raising())


async def test_promise_1_while_the_trainer_starts_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports torch before it listens; what has begun by then goes on."""
    ended: list[str] = []

    async def never_listens(*_: object, **__: object) -> Path:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append("its services")
        return tmp_path

    monkeypatch.setattr(command, "_deploy", lambda *_: [])
    monkeypatch.setattr(command, "beside", never_listens)
    config = SftConfig(model="m", data=tmp_path, max_steps=9)
    with pytest.raises(Stopped) as stopped:
        await asyncio.wait_for(command._train(config, Mock(), tmp_path, Mock(), Mock()), 30)
    assert stopped.value.done is None and ended == ["its services"]
    asked, begun = asyncio.Event(), asyncio.Event()
    begun.set()
    asyncio.get_running_loop().call_soon(asked.set)
    assert await unless(asked, asyncio.sleep(0.01, 5), begun) == 5


async def raising() -> None:
    raise ValueError("no")


async def test_promise_2_asked_twice_everything_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    killed = asyncio.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), killed.set()))
    seen = Mock()
    with heard(seen, tmp_path / "o u t") as asked:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(asked.wait(), 30)
        assert codes == []
        await asyncio.sleep(ONE_WISH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(killed.wait(), 30)
    seen.say.assert_called_once_with("stopping after the step under way; Ctrl-C again kills everything")
    how = f"quartet sft --output-dir '{tmp_path}/o u t' --resume"
    assert codes == [130] and capsys.readouterr().err == f"killed; what was done is kept; go on with: {how}\n"


def test_a_stopped_one_says_how_it_goes_on(
    begin: Any, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    code, _ = begin(
        "--model", str(chat_model), "--data", str(tmp_path / "chats.jsonl"), "--output-dir", str(output)
    )
    said = capsys.readouterr().out
    assert code == 130
    assert f"stopped after step 3; go on with: quartet sft --output-dir {output} --resume\n" in said
    assert f"quartet export {output} MODEL_FOLDER" in said


def test_the_folder_says_what_goes_on(
    begin: Any,
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever it goes on, with options laid over it that may differ."""
    monkeypatch.chdir(tmp_path)
    words = [
        "--model",
        str(chat_model),
        "--data",
        "chats.jsonl",
        "--output-dir",
        "out",
        "--lora.enabled=true",
    ]
    assert begin(*words, "--epochs", "2", "--batch-tokens", "9000")[0] == 130
    assert (tmp_path / "out" / "sft.toml").stat().st_mode & 0o777 == 0o600
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = ["--output-dir", str(tmp_path / "out"), "--resume"]
    code, (first, second) = begin(*resumed)
    assert code == 130 and second == command.in_full(first).model_copy(
        update={"data": tmp_path / "chats.jsonl"}
    )
    assert begin(*resumed, "--trainer.threads", "2")[1][-1].trainer == {"threads": 2}
    capsys.readouterr()
    assert begin(*resumed, "--seed", "5")[0] == 2
    assert "was begun with another seed (0, and not 5)" in capsys.readouterr().err
    (tmp_path / "out" / "sft.toml").unlink()
    assert begin(*resumed)[0] == 2
    assert "has no sft.toml, which says it; give the keys that it was begun with" in capsys.readouterr().err
    assert begin("--output-dir", str(tmp_path / "no"), "--resume")[0] == 2
    assert "holds no fine-tuning; name the folder of one with --output-dir" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert begin(*words, "--epochs", "2", "--batch-tokens", "9000", "--resume")[0] == 130, (
        "by the whole command"
    )


def test_what_is_ended_while_its_data_is_looked_at_goes_on_by_its_folder(
    begin: Any, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """command.py 3: of large data that lasts, and the folder is taken by then."""

    def interrupted(config: SftConfig) -> Any:
        raise KeyboardInterrupt

    words = ["--model", str(chat_model), "--data", str(tmp_path / "chats.jsonl")]
    output = ["--output-dir", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(command, "contents_of", interrupted)
        code, trained = begin(*words, *output)
    assert (code, trained) == (130, []), "nothing was trained"
    assert begin(*output, "--resume")[0] == 130 and len(trained) == 1


def test_nothing_is_overwritten(begin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert begin("--overwrite")[0] == 2
    assert "--overwrite: no fine-tuning is overwritten; delete its folder yourself" in capsys.readouterr().err
