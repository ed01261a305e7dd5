"""What `quartet rl` refuses before anything starts, and how it takes its output folder."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from quartet.cli.__main__ import build_parser, main
from quartet.cli.rl import Job, _claim, default_folder, model_path
from quartet.config import ConfigError, load
from quartet.run.config import RunConfig, parse_run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "reverse-text.toml"


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"run_id": None, "resume": False, "overwrite": False, **changes})


@pytest.fixture
def config() -> RunConfig:
    return load(RunConfig, ["@", str(CONFIG)]).config


def test_the_demo_config_is_the_recipe(config: RunConfig) -> None:
    assert (config.batch_size, config.rollouts_per_example, config.groups_per_batch) == (128, 8, 16)
    assert config.checks.verify_logprobs
    assert config.inference["embedded"]["kv_on_update"] == "recompute"


def test_the_submitted_toml_is_the_same_run(config: RunConfig) -> None:
    job = Job(config, "r", Path("."))
    again = parse_run(job.config_toml)
    assert again == config.model_copy(
        update={"trainer": {}, "orchestrator": {}, "inference": {}, "envhost": {}}
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-stepz", "3"], "did you mean 'max_steps'"),
        (["--batch-size", "100"], "rollouts_per_example = 8 does not divide it; set it to 96 or 104"),
        (["--model", "no/such/model"], "'no/such/model' is neither a folder here nor a model in the"),
        (["--sampling.temperature", "hot"], "sampling.temperature"),
        (["stray"], "argument 'stray' is not understood"),
    ],
)
def test_refusals(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    code = main(["rl", "@", str(CONFIG), *arguments, "--output-dir", str(output)])
    shown = capsys.readouterr().err
    assert code == 2
    assert sentence in shown
    assert shown.count("\n") == 1, "one sentence"
    assert not output.exists(), "nothing was begun"


def test_a_model_folder_is_taken_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_path("m")
    (tmp_path / "m" / "config.json").write_text("{}")
    assert model_path("m") == str(tmp_path / "m")
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert model_path("owner/name") == str(cached / "snapshots" / "abc")


def test_a_used_output_folder_is_refused_with_the_remedy(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "run one"
    job = _claim(config, folder, options())
    assert job.run_id == "run-one"
    with pytest.raises(ConfigError, match="add --resume"):
        _claim(config, folder, options())
    assert _claim(config, folder, options(resume=True)) == job
    changed = config.model_copy(update={"max_steps": 7})
    with pytest.raises(ConfigError, match="another configuration"):
        _claim(changed, folder, options(resume=True))
    (folder / "metrics.jsonl").write_text("old")
    assert _claim(changed, folder, options(overwrite=True)).config.max_steps == 7
    assert not (folder / "metrics.jsonl").exists()


def test_overwrite_deletes_only_what_a_run_wrote(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not written by quartet rl"):
        _claim(config, tmp_path, options(overwrite=True))
    with pytest.raises(ConfigError, match="holds no run"):
        _claim(config, tmp_path / "nothing", options(resume=True))
    assert (tmp_path / "thesis.tex").exists()


def test_run_ids_are_checked(tmp_path: Path, config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="--run-id 'a/b' is refused"):
        _claim(config, tmp_path / "x", options(run_id="a/b"))


def test_default_folder_is_named_after_the_last_config() -> None:
    assert str(default_folder(["@", "a.toml", "@", "dir/b.toml"])).startswith("outputs/b-")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in ("rl", "model", "submit", "watch", "runs", "stop", "resume"):
        assert f"\n    {command} " in shown


def test_the_command_needs_no_torch() -> None:
    code = "import sys, quartet.cli.__main__ as m; m.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
