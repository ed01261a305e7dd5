"""The [kl_penalty] table: algorithm.kl_coef and algorithm.target_kl by the names of other trainers.

1. Where both tables say something, they have to say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pydantic

from quartet.run.algorithm import AlgorithmConfig, snake
from quartet.run.switched import SwitchedConfig
from quartet.run.values import Positive

_COEFFICIENT: Final = ("algorithm.kl_coef", "algorithm.beta")
#: Of each key here, what [algorithm] says of it, as that of a run that was written down does.
_SAID_BY_THE_ALGORITHM: Final[Mapping[str, tuple[str, ...]]] = {
    "kl_penalty.enabled": _COEFFICIENT,
    "kl_penalty.beta": _COEFFICIENT,
    "kl_penalty.target_kl": ("algorithm.target_kl",),
}


def outdone_by_kl_penalty(key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
    """What files say by [algorithm], where an option says it by a table that is on, or switches the table on
    or off: with one that is off goes all that both said."""
    table = before.get("kl_penalty")
    penalty = table if isinstance(table, Mapping) else {}
    was_on, is_switch = penalty.get("enabled") is True, key == "kl_penalty.enabled"
    if is_switch and value is False and was_on:
        return (*_COEFFICIENT, "algorithm.target_kl") if "target_kl" in penalty else _COEFFICIENT
    is_on = was_on or (is_switch and value is True)
    return _SAID_BY_THE_ALGORITHM.get(key, ()) if is_on else ()


class KlPenaltyConfig(SwitchedConfig):
    """The [kl_penalty] table."""

    #: Another name of algorithm.kl_coef.
    beta: Positive = 0.1
    #: Another name of algorithm.target_kl.
    target_kl: Positive | None = None


def with_kl_penalty(run: dict[str, Any]) -> dict[str, Any]:
    """A run's tables whose [algorithm] says what its [kl_penalty] says and it does not."""
    run = snake(run)
    try:
        penalty = KlPenaltyConfig.model_validate(run.get("kl_penalty", {}))
    except pydantic.ValidationError:
        return run  # refused where it is a field
    algorithm = run.get("algorithm", {})
    if not penalty.enabled or not isinstance(algorithm, dict):
        return run
    said = {key: value for key, value in snake(algorithm).items() if value is not None}
    own = {} if penalty.target_kl is None else {"target_kl": penalty.target_kl}
    own |= {} if "beta" in said else {"kl_coef": penalty.beta}
    return {**run, "algorithm": {**own, **said}}


def of_one_kl_penalty(penalty: KlPenaltyConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Where the two do not say the same."""
    for key, other, value in (
        ("kl_coef", "beta", penalty.beta),
        ("target_kl", "target_kl", penalty.target_kl),
    ):
        given = getattr(algorithm, key)
        if penalty.enabled and value is not None and given != value:
            yield (f"kl_penalty.{other} = {value} and algorithm.{key} = {given} are one setting; remove one")
