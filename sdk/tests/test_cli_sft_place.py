"""`quartet sft`: the folder of a fine-tuning, and how it goes on (place.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli import held
from quartet.cli.__main__ import main
from quartet.cli.sft import command
from quartet.cli.sft.place import Calls, begun_ms, begun_steps, cut_metrics, taken
from quartet.config import ConfigError
from quartet.kit.folder import lock_file
from quartet.run.lora import LoraConfig
from quartet.run.sft import MeasureConfig, SavingConfig, SftConfig
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.wandb import WandbConfig
from sft_chats import CHAT, written


@given(steps=st.integers(1, 60), saves=st.sets(st.integers(1, 59)))
def test_promise_1_the_last_call_says_which_step_comes_next(steps: int, saves: set[int]) -> None:
    """Also where it was closed behind a step that no state is saved behind."""
    calls = Calls(steps, [one for one in sorted(saves) if one < steps])
    applied = 0
    for step in range(steps):
        assert calls.first_of(step) == applied + 1
        applied += 2
        assert calls.saves_after(step) is (step + 1 in calls.saves)
        if calls.saves_after(step):
            applied += 1
        if step + 1 < steps:
            assert calls.step_after(applied) == step + 1
    assert calls.step_after(0) == 0
    assert calls.last == applied + 1 and calls.step_after(calls.last) == steps


def test_promise_2_a_folder_goes_on_as_it_was_begun_or_not_at_all(chat_model: Path, tmp_path: Path) -> None:
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=data)

    def begin(output: Path, config: SftConfig) -> None:
        with taken(output, config, resume=False):
            pass

    def go_on(output: Path, config: SftConfig) -> None:
        with taken(output, config, resume=True):
            pass

    with pytest.raises(ConfigError, match="holds no fine-tuning"):
        go_on(output, config)
    assert not output.exists(), "a refusal leaves nothing"
    begin(output, config)
    with pytest.raises(ConfigError, match="add --resume"):
        begin(output, config)
    go_on(output, config)
    shown = {
        "trainer": {"threads": 2},
        "wandb": WandbConfig(project="p"),
        "tensorboard": TensorboardConfig(enabled=True),
    }
    go_on(output, config.model_copy(update=shown))
    with pytest.raises(
        ConfigError,
        match=r"another batch_size \(32, and not 5\); give what it was begun with \(--resume .*sft\.toml",
    ):
        go_on(output, config.model_copy(update={"batch_size": 5}))
    with pytest.raises(ConfigError, match=r"another lora\.enabled \(false, and not true\)"):
        go_on(output, config.model_copy(update={"lora": LoraConfig(enabled=True)}))
    (moved := tmp_path / "moved").symlink_to(tmp_path)
    for same in (moved / data.name, tmp_path / "moved" / ".." / tmp_path.name / data.name):
        go_on(output, config.model_copy(update={"data": same}))
    (other := tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(
        ConfigError, match=r'contents of data \(.*/chats\.jsonl", and not .*/other\.jsonl"\);'
    ):
        go_on(output, config.model_copy(update={"data": other}))
    data.write_text(json.dumps({"messages": CHAT[1:]}))
    with pytest.raises(ConfigError, match="another contents of data; give"):
        go_on(output, config)
    written(tmp_path, {"messages": CHAT})
    (output / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match="is complete"):
        go_on(output, config)
    go_on(output, config.model_copy(update={"tensorboard": TensorboardConfig(enabled=True)}))


def test_promise_2_so_is_the_validation_set(chat_model: Path, tmp_path: Path) -> None:
    data, validation, output = written(tmp_path, {"messages": CHAT}), tmp_path / "val.jsonl", tmp_path / "out"
    validation.write_text("{}")
    config = SftConfig(model=str(chat_model), data=data, validation=validation)
    with taken(output, config, resume=False):
        pass
    assert begun_ms(output) > 1_700_000_000_000 and begun_steps(output) is None
    with taken(output, config.model_copy(update={"eval": MeasureConfig(interval=3)}), resume=True):
        pass
    validation.write_text("{} ")
    with (
        pytest.raises(ConfigError, match="another contents of validation"),
        taken(output, config, resume=True),
    ):
        pass
    without = config.model_copy(update={"validation": None})
    with (
        pytest.raises(ConfigError, match="another contents of validation"),
        taken(output, without, resume=True),
    ):
        pass


def test_promise_2_what_an_earlier_release_began_goes_on(chat_model: Path, tmp_path: Path) -> None:
    """It did not write down what it did not know."""
    config = SftConfig(model=str(chat_model), data=written(tmp_path, {"messages": CHAT}), seed=3)
    output = tmp_path / "out"
    with taken(output, config, resume=False):
        pass
    record = json.loads((output / "run.json").read_text())
    for key in ("run_id", "begun_ms", "lora", "validation", "contents of validation"):
        del record[key]
    (output / "run.json").write_text(json.dumps(record))
    with taken(output, config, resume=True):
        assert begun_ms(output) == 0 and begun_steps(output) is None
    assert begun_steps(tmp_path / "nowhere") is None
    with taken(tmp_path / "other", config, resume=False, steps=7):
        assert begun_steps(tmp_path / "other") == 7
    adapter = config.model_copy(update={"lora": LoraConfig(enabled=True)})
    with pytest.raises(ConfigError, match=r"another lora\.enabled"), taken(output, adapter, resume=True):
        pass


@pytest.mark.parametrize("ckpt", [{}, {"ckpt": {"keep_last": 3}}])
def test_how_many_states_stay_is_told_as_the_folder_was_begun(
    ckpt: dict[str, Any], chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier release left it to the trainer's table; [ckpt] is what has to stay."""
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=data, **ckpt)
    with taken(output, config, resume=False):
        pass
    begin = ["sft", "--model", str(chat_model), "--data", str(data), "--output-dir", str(output)]
    refused = [*begin, "--trainer.keep-last", "5"]
    assert main(refused) == 2
    assert "remove it, and set ckpt.keep_last\n" in capsys.readouterr().err
    assert main([*refused, "--resume"]) == 2
    kept = ckpt.get("ckpt", {}).get("keep_last", 2)
    assert f"remove it, and write ckpt.keep_last = {kept}, as it was begun" in capsys.readouterr().err
    told = SftConfig(model=str(chat_model), data=data, ckpt=SavingConfig(keep_last=kept))
    with taken(output, told, resume=True):
        pass


@pytest.mark.parametrize("line", ['{"event": 4, "st', '{"event": 4}', "[1]", '{"step": 1e400}'])
def test_promise_2_nor_where_its_metrics_are_damaged(chat_model: Path, tmp_path: Path, line: str) -> None:
    """A last line that is torn is no damage: it is cut off."""
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=data)
    with taken(output, config, resume=False):
        pass
    (output / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with taken(output, config, resume=True):
        pass
    (output / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with (
        pytest.raises(ConfigError, match=r"metrics\.jsonl:2 (has no step|is no JSON object)"),
        taken(output, config, resume=True),
    ):
        pass


def test_promise_2_one_process_at_a_time(chat_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=written(tmp_path, {"messages": CHAT}))
    with (
        taken(output, config, resume=False),
        pytest.raises(ConfigError, match="belongs to a fine-tuning that is going on"),
        taken(output, config, resume=True),
    ):
        pass
    with taken(output, config, resume=True):
        assert sorted(entry.name for entry in output.iterdir()) == [".lock", "run.json"]


def test_promise_2_what_another_began_since_the_look_is_kept(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "out" / "metrics.jsonl"

    def another_was_quicker(file: Path) -> IO[bytes]:
        theirs.write_text("their lines")
        return lock_file(file)

    monkeypatch.setattr(held, "lock_file", another_was_quicker)
    config = SftConfig(model=str(chat_model), data=written(tmp_path, {"messages": CHAT}))
    with pytest.raises(ConfigError, match="is not empty"), taken(tmp_path / "out", config, resume=False):
        pass
    assert theirs.read_text() == "their lines" and not (tmp_path / "out" / "run.json").exists()


def test_a_folder_that_is_taken_is_refused_before_any_chat_is_read(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading may take minutes."""
    monkeypatch.setattr(command, "read_sets", None)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    output.mkdir()
    (output / "mine").touch()
    words = ["sft", "--model", str(chat_model), "--data", str(data), "--output-dir", str(output)]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"error: output folder {output} is not empty, and was not written by quartet sft; name another "
        "--output-dir\n"
    )
    assert main([*words, "--resume"]) == 2
    assert "holds no fine-tuning that was begun; name the folder of one" in capsys.readouterr().err
    (output / "mine").unlink()
    assert main([*words, "--resume"]) == 2
    assert "holds no fine-tuning that was begun; leave it out" in capsys.readouterr().err
    with taken(output, SftConfig(model=str(chat_model), data=data), resume=False):
        pass
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"error: output folder {output} is not empty; add --resume to go on with its fine-tuning, or name "
        "another --output-dir\n"
    )


def test_promise_3_lines_of_steps_that_come_again_are_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    cut_metrics(tmp_path, 0)
    assert not file.exists()
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(tmp_path, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    file.write_text('{"step": 0}\n{"step": 1}\n')
    cut_metrics(tmp_path, 1)
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n'
    cut_metrics(tmp_path, 0)
    assert file.read_text() == "", "what was measured before the first step is measured again"
