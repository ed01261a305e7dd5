"""SftConfig: how long a fine-tuning is, and how it learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.sft.requests import run_spec
from quartet.config import ConfigError, load
from quartet.run.sft import SftConfig
from quartet.v1 import trainer_service_pb2 as pb


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


def test_the_optimizers_and_schedules_of_runs() -> None:
    muon = {"optimizer": "muon", "momentum": 0.9, "adamw_learning_rate": 1e-4, "adam_epsilon": 1e-6}
    decay = {"lr_scheduler": "warmup_stable_decay", "warmup_steps": 1, "decay_steps": 3, "min_lr": 1e-6}
    asked = run_spec(SftConfig(model="m", data=Path("d"), batch_size=8, **muon, **decay), 5).optimizer
    assert (asked.kind, asked.momentum) == (pb.OPTIMIZER_KIND_MUON, 0.9)
    assert (asked.adamw_learning_rate, asked.eps, asked.min_lr) == (1e-4, 1e-6, 1e-6)
    assert asked.schedule == pb.SCHEDULE_WARMUP_STABLE_DECAY
    assert (asked.warmup_steps, asked.decay_steps, asked.total_steps) == (1, 3, 5)
    sgd = run_spec(SftConfig(model="m", data=Path("d"), optimizer="sgd"), 40).optimizer
    assert (sgd.kind, sgd.HasField("momentum")) == (pb.OPTIMIZER_KIND_SGD, False)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"decay_steps": 3}, 'decay_steps = 3 belongs to lr_scheduler = "warmup_stable_decay"'),
        ({"lr_scheduler": "warmup_stable_decay"}, "needs decay_steps, from 1 on, not 0"),
        ({"lr_scheduler": "warmup_stable_decay", "decay_steps": 5, "max_steps": 4}, "from 1 to 4, the steps"),
        ({"lr_scheduler": "constant", "min_lr": 1e-6}, "min_lr = 1e-06 is where a rate ends that falls"),
        ({"min_lr": 1e-5}, "is not below learning_rate = 1e-05"),
        ({"momentum": 0.5}, 'momentum belongs to optimizer = "sgd" or "muon"'),
        (
            {"optimizer": "sgd", "adamw_learning_rate": 0.5},
            'adamw_learning_rate belongs to optimizer = "muon"',
        ),
    ],
)
def test_what_a_schedule_or_optimizer_would_not_read_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SftConfig(model="m", data=Path("d"), **keys)


def test_a_decay_has_room_in_the_steps_that_the_chats_are() -> None:
    decay = {"lr_scheduler": "warmup_stable_decay", "decay_steps": 5}
    config = SftConfig(model="m", data=Path("d"), batch_size=8, **decay)
    assert config.steps(40) == 5
    with pytest.raises(ConfigError, match="from 1 to 4, the steps after the warm-up, not 5: 32 chats are 4"):
        config.steps(32)


def test_an_option_says_when_it_ends_in_place_of_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "sft.toml").write_text('model = "m"\ndata = "d"\nepochs = 3\n')
    (other := tmp_path / "other.toml").write_text('model = "m"\ndata = "d"\nmax-steps = 3\n')
    config = load(SftConfig, ["@", str(file), "--max-steps", "95"]).config
    assert (config.epochs, config.max_steps) == (None, 95)
    assert load(SftConfig, ["@", str(other), "--epochs=2"]).config.steps(64) == 4
    for arguments in (["@", str(file), "--epochs=2", "--max-steps=4"], ["@", str(file), "@", str(other)]):
        with pytest.raises(ConfigError, match="both say when it ends"):
            load(SftConfig, arguments)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup", "total"),
    [(0.1, 55, 6, 55), (0.1, 10, 1, 10), (1.0, 4, 4, 5), (0.0, 4, 0, 4)],
)
def test_a_share_of_the_steps_is_a_warm_up(ratio: float, steps: int, warmup: int, total: int) -> None:
    """Rounded up, as by transformers."""
    asked = run_spec(SftConfig(model="m", data=Path("d"), warmup_ratio=ratio), steps).optimizer
    assert (asked.warmup_steps, asked.total_steps) == (warmup, total)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio both say how long"),
        ({"ckpt": {"interval": 5, "epochs": 1}}, "interval and epochs both say how often; give one"),
        ({"ckpt": {"keep_interval": 20, "epochs": 1}}, "keep_interval counts steps, and epochs passes"),
        ({"validation": Path("v"), "eval": {"interval": 5, "epochs": 1}}, "interval and epochs both say how"),
        ({"learns": "everything", "roles": ("user",)}, 'roles and learns = "everything" both say what'),
        (
            {"lora": {"enabled": False, "initial_adapter": "a"}},
            "initial_adapter = 'a' is where an adapter begins",
        ),
    ],
)
def test_what_is_said_twice_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SftConfig(model="m", data=Path("d"), **keys)


def test_an_option_is_in_place_of_what_the_file_says_otherwise(tmp_path: Path) -> None:
    (file := tmp_path / "sft.toml").write_text(
        'model = "m"\ndata = "d"\nvalidation = "v"\nwarmup_steps = 3\n[ckpt]\ninterval = 5\n'
        "[eval]\nepochs = 1\n"
    )
    options = ["--warmup-ratio", "0.5", "--ckpt.epochs", "2", "--eval.interval", "7"]
    config = load(SftConfig, ["@", str(file), *options]).config
    assert (config.warmup_steps, config.warmup_ratio) == (0, 0.5)
    assert (config.ckpt.interval, config.ckpt.epochs, config.eval.interval, config.eval.epochs) == (
        10,
        2,
        7,
        None,
    )
