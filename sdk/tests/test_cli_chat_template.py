"""What is asked of a model's chat template before anything starts (cli/chat_template.py)."""

import json
import sys
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.chat_template import check_chat_template
from quartet.config import ConfigError

REFUSED = r"has no chat template, and 'my-env' asks it in messages; .*chat_template\.jinja"


def model_of(folder: Path, **tokenizer_config: object) -> Path:
    """A folder of a base model, as far as the command looks."""
    folder.mkdir()
    for name, text in {
        "config.json": "{}",
        "model.safetensors": "",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps(tokenizer_config),
    }.items():
        (folder / name).write_text(text)
    return folder


def test_a_model_without_a_template_is_refused_where_it_is_asked_in_messages(tmp_path: Path) -> None:
    """Promises 1 and 2"""
    base = model_of(tmp_path / "base", eos_token="</s>")
    with pytest.raises(ConfigError, match=REFUSED):
        check_chat_template(base, {}, ["reward-service", "my-env"])
    check_chat_template(base, {}, ["reward-service"])
    check_chat_template(base, {"chat": {"template_file": "chat.jinja"}}, ["my-env"])
    check_chat_template(model_of(tmp_path / "chats", chat_template="{{ messages }}"), {}, ["my-env"])
    for name in ("chat_template.jinja", "tekken.json"):
        folder = model_of(tmp_path / name)
        (folder / name).write_text("{{ messages }}")
        check_chat_template(folder, {}, ["my-env"])
    (base / "tokenizer_config.json").unlink()
    check_chat_template(base, {}, ["my-env"])


@pytest.mark.parametrize("command", ["rl", "baseline", "eval"])
def test_commands_refuse_it_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base = model_of(tmp_path / "base")
    asked = ["--env", '[{id = "my-env"}]', "--max-steps=1", "--dry-run"] if command == "rl" else ["my-env"]
    assert main([command, *asked, "--model", str(base), f"--envhost.python={sys.executable}"]) == 2
    assert f"the model in {base} has no chat template, and 'my-env'" in capsys.readouterr().err
