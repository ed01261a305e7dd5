"""What a script lays over the run that its arguments are (args.overrides).

1. An algorithm among them is that alone, without what arguments say of theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quartet.config.model import ConfigError
from quartet.run.config import RunConfig
from quartet.run.dialect import give_way
from quartet.run.presets import PRESETS
from quartet.scripts.draft import Draft, Table, validated

#: Of a run, what the trainer itself is given.
GIVEN = {"model": "give GRPOTrainer another model", "env": "give GRPOTrainer another env"}


def overridden(draft: Draft, given: Mapping[str, str] = GIVEN) -> RunConfig:
    """The run, with overrides laid over it; `given`: keys that are not laid over, and what to do. Raises
    ConfigError by the names of arguments."""
    overrides = draft.args.overrides
    for key, instead in given.items():
        if key in overrides:
            raise ConfigError(f"args.overrides: {key!r} is refused: {instead}")
    table = copy.deepcopy(draft.table)
    _give_way(table["algorithm"], overrides.get("algorithm"))
    return validated(draft, RunConfig, table)


def _give_way(algorithm: Table, said: Any) -> None:
    """A preset among the overrides, or another loss, is that alone, without what arguments say of theirs."""
    preset, loss = (said.get("preset"), said.get("loss")) if isinstance(said, Mapping) else (None, None)
    if preset is None and loss in (None, algorithm["loss"]):
        return
    give_way(algorithm, said)
    values = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if {**algorithm, **values, **said}.get("aggregation") != "constant":
        algorithm.pop("constant_tokens", None)
