"""What of a run does not go with the length that its model was made for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.checked import doubts
from quartet.cli.run_file import load_run
from quartet.config import ConfigError

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "reverse-text.toml"


def model_of(folder: Path, positions: object = 2048) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def said(model: Path | str, *keys: str) -> list[str]:
    run = ["--model", str(model), "--env", '[{id = "a"}, {id = "b", sampling = {max_tokens = 3000}}]', *keys]
    return list(doubts(load_run(run, starts_services=False).config))


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter of environments is looked for."""
    monkeypatch.setattr("quartet.cli.rl.with_interpreters", lambda envhost, _: envhost)


ENDS = "an answer ends there, with its prompt"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["--sampling.max-tokens=2048"],
         "env.1.sampling.max_tokens = 3000 is above the model's context of 2048 tokens (its "
         f"max_position_embeddings): {ENDS}"),
        (["--sampling.max-tokens=5000", "--eval.sampling.max-tokens=9000"],
         "sampling.max_tokens = 5000 and env.1.sampling.max_tokens = 3000 and eval.sampling.max_tokens = "
         f"9000 are above the model's context of 2048 tokens (its max_position_embeddings): {ENDS}"),
        (["--sampling.max-tokens=9", "--inference.max-model-len=1024"],
         "env.1.sampling.max_tokens = 3000 is above the model's context of 1024 tokens "
         f"(inference.max_model_len): {ENDS}"),
        (["--sampling.max-tokens=9", "--algorithm.preset=dr_grpo"],
         "env.1.sampling.max_tokens = 3000 is above the model's context of 2048 tokens (its "
         f"max_position_embeddings): {ENDS}; the loss divides by 3000, so set max_tokens or "
         "algorithm.constant_tokens lower"),
        (["--eval.sampling.max-tokens=1000000"],
         "env.1.sampling.max_tokens = 3000 is above the model's context of 2048 tokens (its "
         f"max_position_embeddings): {ENDS}"),
        (["--sampling.max-tokens=9", "--algorithm.preset=dr_grpo", "--algorithm.constant-tokens=100"],
         "env.1.sampling.max_tokens = 3000 is above the model's context of 2048 tokens (its "
         f"max_position_embeddings): {ENDS}"),
    ],
)  # fmt: skip
def test_answers_beyond_the_context_are_told(tmp_path: Path, keys: list[str], told: str) -> None:
    assert said(model_of(tmp_path / "model"), *keys) == [told]


@pytest.mark.parametrize("positions", [3000, 0, "long", None])
def test_what_fits_or_is_not_known_is_not(tmp_path: Path, positions: object) -> None:
    assert said(model_of(tmp_path / "model", positions)) == []
    assert said("not/here") == []


def test_a_dry_run_tells_answers_and_refuses_what_the_engine_would_of_its_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(tmp_path / "model")
    run = ["rl", "@", str(CONFIG), "--model", str(model), "--envhost.python", sys.executable, "--dry-run"]
    run += ["--output-dir", str(tmp_path / "out")]
    assert main([*run, "--sampling.max-tokens=5000", "--inference.max-model-len=2048"]) == 0
    assert "sampling.max_tokens = 5000 is above the model's context of 2048" in capsys.readouterr().err
    assert main([*run, "--inference.max-model-len=2049"]) == 2
    assert capsys.readouterr().err == (
        "error: inference.max_model_len = 2049 is refused: the model was made for 2048 "
        "(max_position_embeddings in its config.json); set at most that, or leave it out, which is as much\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_length_of_another_engine_is_its_own_to_refuse(tmp_path: Path) -> None:
    from quartet.cli.context import check_length

    model = model_of(tmp_path / "model")
    run = ["--model", str(model), "--env", '[{id = "a"}]', "--inference.max-model-len=4096"]
    with pytest.raises(ConfigError, match="max_model_len = 4096 is refused"):
        check_length(load_run(run, starts_services=False).config, model)
    check_length(load_run([*run, "--inference.engine=vllm"], starts_services=False).config, model)
