"""How a run is carried out: what it says beside what is computed, so that it may differ when the run goes on.

1. Two runs that differ in nothing else train on the same batches with the same losses, as far as their
   rollouts come out alike: a rollout that has more time may succeed.
2. All else decides what is computed, if only its last bits: so microbatch_tokens, by which gradients are
   added up in another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from quartet.config import Config
from quartet.run.config import SHOWN, RunConfig
from quartet.run.hosted import NamedConfig
from quartet.run.written_out import is_same_run, written_out

OF_A_RUN: Final = ("max_concurrent", "messages_of_members", "on_environment_change", "ckpt")
OF_EVALUATIONS: Final = ("interval", "timeout_seconds")
OF_AN_ENVIRONMENT: Final = ("timeout_seconds", "max_retries")
#: Of an environment: somebody's key may be among them, and what differs is told in logs.
ARGS: Final = ".args."
#: What is said of keys that look as if they were some of these.
WHY: Final = {
    "max_steps": "a run is made longer, never shorter",
    "microbatch_tokens": "sums that are cut otherwise have other last bits",
}

C = TypeVar("C", bound=Config)
E = TypeVar("E", bound=NamedConfig)


def carried_out_as(run: RunConfig, other: RunConfig) -> RunConfig:
    """The run, carried out as the other one is."""
    evaluations = _as(run.eval, other.eval, OF_EVALUATIONS)
    environments = {"env": _environments(evaluations.env, other.eval.env)}
    return _as(run, other, OF_A_RUN).model_copy(
        update={
            "env": _environments(run.env, other.env),
            "eval": evaluations.model_copy(update=environments),
        }
    )


def computes_the_same(run: RunConfig, other: RunConfig) -> bool:
    """Whether they differ in nothing but in how they are carried out and shown."""
    return is_same_run(carried_out_as(other, run), run)


def differences(known: RunConfig, asked: RunConfig) -> list[str]:
    """Of each key that differs, what it was and is (not of an environment's arguments), and why that matters
    where one may not expect it. Defaults are no difference from what is left out (written_out.py)."""
    return list(_differences(_flat(written_out(known)), _flat(written_out(asked))))


def _as(config: C, other: C, keys: tuple[str, ...]) -> C:
    return config.model_copy(update={key: getattr(other, key) for key in keys})


def _environments(ours: tuple[E, ...], others: tuple[E, ...]) -> tuple[E, ...]:
    if len(ours) != len(others):
        return ours
    return tuple(_as(one, other, OF_AN_ENVIRONMENT) for one, other in zip(ours, others, strict=True))


def _flat(config: RunConfig) -> dict[str, Any]:
    """Every value by its dotted key, but for where the run is shown; what is empty is a value, too."""
    found: dict[str, Any] = {}

    def take(prefix: str, value: Any) -> None:
        if isinstance(value, dict | list) and value:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in inner:
                take(f"{prefix}.{key}" if prefix else str(key), one)
        else:
            found[prefix] = value

    take("", config.model_dump(mode="json", exclude_none=True, exclude=set(SHOWN)))
    return found


def _differences(known: dict[str, Any], asked: dict[str, Any]) -> Iterator[str]:
    keys = known.keys() | asked.keys()
    for key in sorted(keys):
        was, now = (json.dumps(one[key]) if key in one else "nothing" for one in (known, asked))
        # Of a list that is empty on one side alone, what is in the other's is told.
        if was != now and not any(other.startswith(f"{key}.") for other in keys):
            told = "is another" if ARGS in key else f"was {was} and is {now}"
            yield f"{key} {told}{f', and {WHY[key]}' if key in WHY else ''}"
