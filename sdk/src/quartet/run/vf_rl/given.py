"""A file of vf-rl: what it says, with the defaults that it has there."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quartet.run.dialect import Tables, refuse
from quartet.run.vf_rl.keys import DEFAULTS, INHERITED, OF_THE_FORM


def is_vf_rl(tables: Mapping[str, Any]) -> bool:
    """Whether tables have the form of vf-rl: [trainer.args]; or one [env] beside gpus or [inference.args],
    and nothing else but the model.
    """
    env = tables.get("env")
    trainer, inference = (
        one if isinstance(one := tables.get(name), dict) else {} for name in ("trainer", "inference")
    )
    alone = tables.keys() <= {"model", "env", "inference", "trainer"}
    of_form = "gpus" in trainer or inference.keys() & {"gpus", "args"}
    return ("args" in trainer and not isinstance(env, list)) or (
        isinstance(env, dict) and alone and bool(of_form)
    )


def owns(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The place of an option's key in a file of vf-rl; None where it is Quartet's."""
    if len(path) == 1 and (path[0] in DEFAULTS or path[0] in INHERITED):
        return ("trainer", "args", path[0])
    return path if len(path) > 1 and path[1] in OF_THE_FORM.get(path[0], ()) else None


@dataclass(frozen=True)
class Given:
    """What a file says."""

    env: Tables
    args: Tables
    #: A number, or a list, as the launcher takes them.
    trainer_gpus: Any
    inference_args: Tables
    inference_gpus: Any
    #: Quartet's own keys in it.
    others: Tables
    #: How long Quartet's own keys say that the run is, in it or beside it.
    own_steps: int | None

    @classmethod
    def of(cls, tables: Mapping[str, Any], beside: Mapping[str, Any]) -> Given:
        """What these tables say, which stay as they are; `beside` them Quartet's keys. Raises ConfigError."""
        others = {key: copy.deepcopy(value) for key, value in tables.items() if key != "env"}
        env = _table("env", tables.get("env", {}))
        found = {}
        for service in ("trainer", "inference"):
            own = _table(service, others.pop(service, {}))
            gpus = own.pop("gpus", 1)
            found[service] = (_snake(_table(f"{service}.args", own.pop("args", {}))), gpus)
            if own:
                others[service] = own
        (args, trainer_gpus), (inference_args, inference_gpus) = found["trainer"], found["inference"]
        steps = {**_snake(others), **beside}.get("max_steps")
        own_steps = steps if type(steps) is int and steps > 0 else None  # any other is refused by the run
        return cls(env, args, trainer_gpus, inference_args, inference_gpus, others, own_steps)

    def value(self, key: str) -> Any:
        """What the file says, or the default."""
        default = DEFAULTS[key] if key in DEFAULTS else INHERITED.get(key)
        return self.args.get(key, default)

    def source(self, key: str) -> str:
        """Where it says so."""
        return f"trainer.args.{key}" if key in self.args else f"vf-rl's default of trainer.args.{key}"

    def flag(self, key: str) -> bool:
        """True or False. Raises ConfigError."""
        if not isinstance(value := self.value(key), bool):
            refuse(f"trainer.args.{key}", value, "should be true or false")
        return value

    def count(self, key: str) -> int:
        """A whole number from 1 on. Raises ConfigError."""
        if type(value := self.value(key)) is not int or not 1 <= value < 2**32:
            refuse(f"trainer.args.{key}", value, "should be a whole number from 1 on")
        return value

    def steps(self) -> int:
        """Of the run. Raises ConfigError."""
        return self.own_steps or self.count("max_steps")

    def text(self, key: str) -> str | None:
        """Text; None for an empty one and for no value. Raises ConfigError."""
        if not isinstance(value := self.value(key), str | None):
            refuse(f"trainer.args.{key}", value, 'should be text in quotes, such as "name"')
        return value or None

    def part(self, key: str) -> int:
        """A part of max_steps, in steps; 1 is all of them. Raises ConfigError."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            refuse(f"trainer.args.{key}", value, "should be a part of max_steps, from 0 to 1")
        return math.ceil(value * self.steps())

    def interval(self, key: str) -> int:
        """Steps; below 1 it is a part of max_steps, as transformers reads it."""
        value = self.value(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31
        if not is_number or (value > 1 and value != int(value)):
            refuse(f"trainer.args.{key}", value, "should be a number of steps, or a part of max_steps")
        return math.ceil(value * self.steps()) if value < 1 else int(value)


def _table(key: str, value: Any) -> Tables:
    if not isinstance(value, dict):
        refuse(key, value, "should be a table")
    return dict(value)


def _snake(table: Tables) -> Tables:
    return {key.replace("-", "_"): value for key, value in table.items()}
