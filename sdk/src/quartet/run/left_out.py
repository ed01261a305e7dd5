"""What is used of keys that a file leaves out, where that depends on what else it says.

1. Only keys that the chosen loss, credit or optimizer reads have such a value, and only where they are left
   out.
2. The values are those that the trainer takes where it is told none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quartet.config import Config
from quartet.run.algorithm import AlgorithmConfig
from quartet.run.config import RunConfig
from quartet.run.learning import LearningConfig
from quartet.run.written_out import ENTROPY_COEF_DELTA, MOMENTUM, OF_LOSSES


def of_a_run(config: RunConfig) -> dict[str, Any]:
    """By dotted key."""
    algorithm = config.algorithm
    used = {f"algorithm.{key}": value for key, value in _of_the_algorithm(algorithm)}
    if algorithm.normalised_by == "constant" and algorithm.constant_tokens is None:
        used["algorithm.constant_tokens"] = config.constant_tokens
    return used if config.external_trainer else used | of_the_optimizer(config)


def of_the_optimizer(config: LearningConfig) -> dict[str, Any]:
    """By key."""
    used: dict[str, Any] = {}
    if config.momentum is None and config.optimizer in MOMENTUM:
        used["momentum"] = MOMENTUM[config.optimizer]
    if config.optimizer == "muon" and config.adamw_learning_rate is None:
        used["adamw_learning_rate"] = config.learning_rate
    return used


def _of_the_algorithm(config: AlgorithmConfig) -> Iterator[tuple[str, Any]]:
    for key, value in OF_LOSSES.get(config.loss, {}).items():
        if getattr(config, key) is None and isinstance(value, Config):
            yield from ((f"{key}.{inner}", one) for inner, one in value)
        elif getattr(config, key) is None:
            yield key, value
    if config.aggregation is None:
        yield "aggregation", config.normalised_by
    if config.target_entropy is not None and config.entropy_coef_delta is None:
        yield "entropy_coef_delta", ENTROPY_COEF_DELTA
    if config.dynamic_sampling and config.max_resample is None:
        yield "max_resample", config.resamples
    if config.needs_reference and config.reference is None:
        yield "reference", {}  # the base model
