"""SftConfig: how long a fine-tuning is."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.config import ConfigError, load
from quartet.run.sft import SftConfig


@pytest.mark.parametrize(
    ("epochs", "chats", "batch_size", "steps"),
    [
        (1.0, 4000, 64, 63),
        (2.0, 96, 64, 3),
        (2.0, 100, 64, 4),
        (0.5, 96, 32, 2),
        (1.1, 100, 10, 11),
        (0.01, 5, 8, 1),
    ],
)
def test_no_chat_is_left_out(epochs: float, chats: int, batch_size: int, steps: int) -> None:
    config = SftConfig(model="m", data=Path("d"), epochs=epochs, batch_size=batch_size)
    assert config.steps(chats) == steps


def test_an_option_says_when_it_ends_in_place_of_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "sft.toml").write_text('model = "m"\ndata = "d"\nepochs = 3\n')
    (other := tmp_path / "other.toml").write_text('model = "m"\ndata = "d"\nmax-steps = 3\n')
    config = load(SftConfig, ["@", str(file), "--max-steps", "95"]).config
    assert (config.epochs, config.max_steps) == (None, 95)
    assert load(SftConfig, ["@", str(other), "--epochs=2"]).config.steps(64) == 4
    for arguments in (["@", str(file), "--epochs=2", "--max-steps=4"], ["@", str(file), "@", str(other)]):
        with pytest.raises(ConfigError, match="both say when it ends"):
            load(SftConfig, arguments)
