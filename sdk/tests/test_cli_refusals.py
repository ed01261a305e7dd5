"""What whoever wrote a wrong file or command line is told: everything, at once, by every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.cli.__main__ import main

FILE = """
model = "{model}"
policy_lr = 1e-5
[[env]]
id = "reverse-text"
[trainer]
lr = 1
threads = "many"
[inference]
max_modle_len = 3
[inference.server]
adress = "localhost"
"""


def _lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    return shown.removeprefix("error: ").rstrip("\n").split("\n  also: ")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(model=tmp_path / "none"))
    return str(path)


def test_services_look_at_their_tables_of_a_run_that_is_refused(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(["rl", "@", file, "--overwrit", "--sampling.max-tokens=x"], capsys)
    starts = [
        "option '--overwrit' has no value; did you mean '--overwrite'?",
        "'lr' is no key of [trainer]",
        "unknown key 'policy_lr'",
        "sampling.max_tokens = 'x'",
        "model = ",
        "[trainer] threads = 'many' is refused: should be a whole number",
        "[inference] unknown key 'server.adress'; did you mean 'server.address'?",
        "[inference] unknown key 'max_modle_len'; did you mean 'max_model_len'?",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_of_what_only_services_refuse_each_says_its_own(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is no model, so that none of them could be started."""
    text = Path(file).read_text().replace("policy_lr", "learning_rate").replace("lr = 1\n", "")
    (good := tmp_path / "good.toml").write_text(text)
    first, *others = _lines(["rl", "@", str(good), "--dry-run"], capsys)
    assert "is neither a folder here" in first
    assert [line.split(" ")[0] for line in others] == ["[trainer]", "[inference]", "[inference]"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rl", "--resum"], "'--resume'"),
        (["rl", "--output-dri", "x"], "'--output-dir'"),
        (["rl", "--max-step", "3"], "'max_steps'"),
        (["submit", "--orchestrator", "127.0.0.1:1", "--run-idd", "x"], "'--run-id'"),
        (["evaluate", "RUN", "--orchestrator", "127.0.0.1:1", "--token-fiel", "x"], "'--token-file'"),
        (["sft", "--output-dri", "x"], "'--output-dir'"),
        (["eval", "e", "-m", "m", "--env-arg", "{}"], "'--env-args'"),
        (["eval", "e", "-m", "m", "--num-exmaples", "3"], "'num_examples'"),
        (["baseline", "e", "-m", "m", "--full-rewrad", "1"], "'--full-reward'"),
        (["env", "check", "e", "--full-rewrad", "1"], "'--full-reward'"),
    ],
)
def test_a_misspelt_flag_is_told_from_a_key(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(f"did you mean {meant}?" in line for line in _lines(arguments, capsys))
