"""A folder that somebody else trains in, and callbacks that write down what they hear of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.scripts.callbacks import EVENTS, Callbacks
from quartet.scripts.following import Following
from quartet.scripts.loop import Length, Moment
from quartet.sft import SFTConfig

logger = logging.getLogger("quartet.test")


class Heard:
    """Writes down what it hears: of each event its name and its step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.then: dict[tuple[str, int], Callable[[Any, Any], Any]] = {}

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(event)

        def called(args: Any, state: Any, control: Any, **told: Any) -> Any:
            self.events.append((event, state.global_step))
            self.told.append((event, told))
            then = self.then.get((event, state.global_step))
            return None if then is None else then(state, control)

        return called

    def of(self, *names: str) -> list[tuple[str, int]]:
        return [one for one in self.events if one[0] in names]


class Training:
    """A folder that somebody else trains in, and the callbacks that follow it."""

    def __init__(self, folder: Path, *callbacks: Any, **args: Any) -> None:
        self.folder = folder
        self.args = SFTConfig(str(folder), **args)
        self.heard = Heard()
        self.callbacks = Callbacks([*callbacks, self.heard], self.args, logger, model="m", optimizer=None)
        self.following = Following(self.callbacks, self.args, folder)
        self.stops = 0
        self.errors: list[BaseException] = []

    def write(self, *rows: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def open(
        self, steps: int, of_epoch: int | None = None, measured: tuple[int, ...] = (), **more: Any
    ) -> None:
        self.following.open(Length(steps, of_epoch, lambda step: step in measured), moment_of, **more)
        self.following.begin()

    def look(self) -> None:
        def stop() -> None:
            self.stops += 1

        self.following.look(stop, self.errors.append)


def moment_of(row: dict[str, Any]) -> Moment:
    is_evaluation = any(name.startswith("eval_") for name in row)
    return Moment(row["step"], None if row.get("silent") else dict(row), is_evaluation=is_evaluation)


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1 / number}


def evaluation(after: int, value: float = 0.5) -> dict[str, Any]:
    return {"step": after, "eval_reward": value}
