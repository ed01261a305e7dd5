"""Trainers of quartet.trl, made without services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"text {number}", "answer": number} for number in range(20)]
CHATS = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(3)]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def other(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def arguments(folder: Path) -> GRPOConfig:
    return GRPOConfig(str(folder / "run"), max_steps=10, logging_steps=2)


def maker(model: Path, args: GRPOConfig) -> Callable[..., GRPOTrainer]:
    """Makes one of that model, with these arguments, and others where they are given."""

    def made(**given: Any) -> GRPOTrainer:
        usual = {"model": str(model), "reward_funcs": length, "args": args, "train_dataset": ROWS}
        return GRPOTrainer(**{**usual, **given})

    return made
