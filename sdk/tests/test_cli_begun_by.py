"""Folders that are not what a command takes them for: of another release, of another command, of nobody's."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import pytest
from planned_runs import accepted, planned
from quartet.cli import rl
from quartet.cli.__main__ import main
from quartet.cli.attempt import taken
from quartet.cli.begun_by import RELEASE
from quartet.cli.job import RECORD, RUN_FILE
from quartet.cli.job_arguments import run_and_folder
from quartet.cli.overwritten import check_not_needed
from quartet.config import ConfigError
from quartet.run.config import RunConfig

#: As `quartet sft` writes it.
OF_A_FINE_TUNING = {"run_id": "sft", "model": "m", "data": "chats.jsonl"}


@pytest.fixture
def folder(tmp_path: Path, config: RunConfig) -> Path:
    """Of a run."""
    with accepted(planned(config, tmp_path / "run")):
        pass
    return tmp_path / "run"


def of_release(folder: Path, release: str) -> None:
    """As one would have written it that has one more key."""
    record = json.loads((folder / RECORD).read_text())
    assert record[RELEASE] == version("quartet")
    record |= {RELEASE: release, "config_toml": "new_key = 1\n" + record["config_toml"]}
    (folder / RECORD).write_text(json.dumps(record))


def test_a_run_of_another_release_is_told_as_that(folder: Path, config: RunConfig) -> None:
    """Neither does the advice name the command that was just refused."""
    of_release(folder, "9.0.0")
    with pytest.raises(ConfigError) as caught:
        planned(config, folder, resume=True)
    said = str(caught.value)
    assert said.startswith(
        f"--resume: {folder} was begun by release 9.0.0, and this one ({version('quartet')})"
    )
    assert "refuses what it wrote (unknown key 'new_key'" in said
    assert f"go on with that, or start a new run in another --output-dir (initial_state = '{folder}'" in said
    (folder / RUN_FILE).write_text("new_key = 1\n" + (folder / RUN_FILE).read_text())
    options = argparse.Namespace(resume=True, output_dir=folder, flags=())
    with pytest.raises(ConfigError) as caught:
        run_and_folder(options, [])
    assert "was begun by release 9.0.0" in str(caught.value) and "go on with that" in str(caught.value)
    assert "quartet rl @" not in str(caught.value) and str(caught.value).count("new_key") == 1
    of_same = json.loads((folder / RECORD).read_text()) | {RELEASE: version("quartet")}
    (folder / RECORD).write_text(json.dumps(of_same))
    with pytest.raises(ConfigError, match="was begun by another release, or changed since, and this one"):
        run_and_folder(options, [])


def test_a_folder_of_a_model_is_offered_nothing_that_it_cannot_do(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        planned(config, tmp_path)
    assert str(caught.value).endswith(
        "is not empty, and was not written by quartet rl; name another --output-dir"
    )
    with pytest.raises(ConfigError, match=r"--overwrite: .* was not written by quartet rl; name another"):
        planned(config, tmp_path, overwrite=True)
    assert (tmp_path / "config.json").exists()


def test_a_fine_tuning_is_neither_gone_on_with_nor_deleted_by_a_run(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RECORD).write_text(json.dumps(OF_A_FINE_TUNING))
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="was not written by quartet rl"):
            planned(config, tmp_path, overwrite=overwrite)
    with pytest.raises(ConfigError, match="holds no run"):
        planned(config, tmp_path, resume=True)
    assert main(["rl", "--resume", "--output-dir", str(tmp_path)]) == 2
    assert f"--resume: {tmp_path} holds no run" in capsys.readouterr().err
    assert json.loads((tmp_path / RECORD).read_text()) == OF_A_FINE_TUNING


def test_a_run_does_not_overwrite_what_it_begins_with(
    folder: Path, tmp_path: Path, config: RunConfig
) -> None:
    """overwritten.py 4: it is told before anything starts, and by the key."""
    model = folder / "checkpoint"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    (beside := tmp_path / "elsewhere").mkdir()
    for file in model.iterdir():
        (beside / file.name).touch()
    (folder / "led").symlink_to(beside)
    for named in (model, tmp_path / "link" / "checkpoint", folder / "led"):
        asked = config.model_copy(update={"model": str(named)})
        with pytest.raises(ConfigError) as caught:
            rl.prepared(asked, folder, resume=False, overwrite=True)
        told = [str(one) for one in caught.value.each]
        assert any(one.startswith("model = ") and "is in the output folder" in one for one in told)
    asked = config.model_copy(update={"model": str(tmp_path / "runs-model")})
    check_not_needed(asked, folder, "another --output-dir")
    lora = config.lora.model_copy(update={"enabled": True, "initial_adapter": str(folder / "a")})
    for changed in ({"initial_state": str(folder)}, {"lora": lora}):
        with pytest.raises(ConfigError, match=r"is in the output folder, .*name another --output-dir"):
            check_not_needed(asked.model_copy(update=changed), folder, "another --output-dir")


def test_a_free_folder_that_a_model_was_put_into_is_not_emptied(tmp_path: Path, config: RunConfig) -> None:
    """job.py 2: an attempt that was killed before its run was accepted left it free."""
    with taken(planned(config, tmp_path / "run")):
        pass
    (tmp_path / "run" / "model").mkdir()
    asked = config.model_copy(update={"model": str(tmp_path / "run" / "model")})
    with pytest.raises(ConfigError, match="is in the output folder"):
        check_not_needed(asked, tmp_path / "run", "another --output-dir")
