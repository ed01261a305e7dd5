"""What a script holds of an environment: its name and its arguments.

The environment host loads it, in a process of its own: nothing here imports verifiers.

1. What is not there is refused when it is named, with what to do.
2. What a script looks for in the object itself is refused as an attribute, with where that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.config.model import ConfigError


@dataclass(frozen=True)
class Environment:
    """An environment and its arguments. `python` is the interpreter that has it, where none of those that
    are looked at has; `weight` its share of the rollouts, `name` what it is called, among several."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check_sendable(f"Environment({self.id!r})", self.args)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an environment is a name here, which the environment host loads, and has no {name!r}; 'quartet "
            "eval' measures a model on it, 'quartet env show' prints its rewards and an example"
        )


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """An installed environment with these arguments. Raises ConfigError."""
    from quartet.cli.env.installed import interpreter_of

    if not isinstance(env_id, str):
        raise ConfigError(f"load_environment({env_id!r}): name an environment, as text")
    _check_sendable(f"load_environment({env_id!r})", env_args)
    interpreter_of(env_id)
    return Environment(env_id, dict(env_args))


def _check_sendable(what: str, env_args: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    for name, value in env_args.items():
        if (wrong := _unsendable(value)) is not None:
            raise ConfigError(
                f"{what}: {name} = {wrong!r} cannot be handed to the environment's process; give text, "
                "numbers, booleans, and lists and dicts of them, or leave it out"
            )


def _unsendable(value: Any) -> Any | None:
    """What of a value is no TOML; None is the answer for a value that is, and never inside one."""
    if isinstance(value, str | bool | int | float):
        return None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        return "None" if value is None else value
    return next((wrong for one in inner if (wrong := _unsendable(one)) is not None), None)
