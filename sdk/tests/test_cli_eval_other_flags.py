"""Flags of `vf-eval`, `vf-gepa` and `prime eval`, and keys of their files: refused with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.gepa.config import GepaConfig
from quartet.config import Config, ConfigError, load
from quartet.config.keys import known_keys


@pytest.mark.parametrize("command", ["eval", "gepa", "baseline"])
def test_a_line_of_the_prime_command_is_refused_with_what_to_write(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "run", "reverse-text", "-m", "x"]) == 2
    assert "write 'reverse-text' without it" in capsys.readouterr().err


def test_a_key_of_a_file_of_verifiers_is_told_by_what_it_is_here(tmp_path: Path) -> None:
    file = tmp_path / "vf.toml"
    file.write_text(
        """
        model = "m"
        endpoint_id = "mini"
        save_results = true
        shuffle = true
        [[eval]]
        env_id = "reverse-text"
        env_args = { k = 1 }
        sampling_args = { temperature = 0.7 }
        max_retries = 3
        [[ablation]]
        env_id = "gsm8k"
        """
    )
    with pytest.raises(ConfigError) as refused:
        load(EvalFileConfig, ["@", str(file)])
    for key, said in (
        ("endpoint_id", "it is called 'model' here"),
        ("save_results", "results are always written"),
        ("shuffle", "examples are the first --num-examples of a split"),
        ("eval.0.env_id", "it is called 'eval.0.id' here"),
        ("eval.0.env_args", "it is called 'eval.0.args' here"),
        ("eval.0.sampling_args", "it is called 'eval.0.sampling' here"),
        ("ablation.0.env_id", "it is called 'ablation.0.id' here"),
    ):
        assert f"unknown key '{key}' (in {file}); {said}" in str(refused.value)
    assert "max_retries" not in str(refused.value)
    file.write_text('model = "m"\nstate_columns = ["a"]\n[gepa]\nmax_calls = 9\n')
    with pytest.raises(ConfigError, match="its keys stand above the first table here"):
        load(GepaConfig, ["@", str(file)])


@pytest.mark.parametrize("names", [EvalFileConfig, GepaConfig])
def test_no_key_is_told_to_be_somebody_elses(names: type[Config]) -> None:
    ours = set(known_keys(names))
    assert not ours & set(names.OTHER_NAMES)


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("eval", ["-s"], "-s is a flag of Verifiers' command, not of this one: results are always written"),
        ("eval", ["--save_results"], "--save-results is a flag of Verifiers' command"),
        ("eval", ["--select.skip", "3"], "examples are the first --num-examples of a split"),
        ("eval", ["--env.taskset.system-prompt", "x"], "arguments of the environment are --env-args"),
        ("eval", ["--env.timeout.episode=3"], "write timeout_seconds in [[eval]] of a file"),
        ("eval", ["--run.dir", "x"], "write --output-dir and --run-id"),
        ("eval", ["--no-push"], "nothing is uploaded; leave it out"),
        ("eval", ["-S", '{"top_p": 0.9}'], "each other key as --sampling.top-p 0.9"),
        ("eval", ["--shuffle"], "examples are the first --num-examples of a split"),
        ("eval", ["-C", "judge,turn"], "all metrics and rewards of a rollout are written"),
        ("eval", ["--num-workers", "2"], "--envhost.workers 2 is how many"),
        ("eval", ["--no-rich"], "write --plain"),
        ("eval", ["-p", "./environments"], "found in its own interpreter, where quartet env install"),
        ("gepa", ["--sampling-args={}"], "write --temperature 0.7"),
        ("gepa", ["--run-dir", "x"], "write --output-dir and --run-id"),
    ],
)
def test_a_flag_of_verifiers_command_is_told_by_what_it_is_here(
    command: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "reverse-text", "-m", "any", *flags]) == 2
    assert said in capsys.readouterr().err
