"""The adapter that a run begins with (lora.initial_adapter), on a machine that has its folder.

1. What [lora] leaves out of what the adapter decides is taken from the folder, and written down with the run:
   who goes on with it reads the run's own file. What it says stays, and is refused where it does not fit
   (adapter_fit.py).
2. A run that goes on began with it, and the folder need not be there, or as it was, any more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quartet.adapter_config import adapter_config_of
from quartet.cli.adapter_fit import KEYS
from quartet.config import ConfigError
from quartet.run.lora import LoraConfig


def with_adapter(lora: LoraConfig, begun: LoraConfig | None) -> LoraConfig:
    """The table with the adapter's absolute path, and what that decides. `begun`: of the run that goes on.
    Raises ConfigError."""
    if not lora.enabled or lora.initial_adapter is None:
        return lora
    folder = Path(os.path.expanduser(lora.initial_adapter)).absolute()
    if begun is not None and begun.initial_adapter == str(folder):
        decided = {key: getattr(begun, key) for key in KEYS.values()}
    else:
        decided = _decided_by(folder, lora.initial_adapter)
    left_out = {key: value for key, value in decided.items() if key not in lora.model_fields_set}
    with_it = lora.model_copy(update={**left_out, "initial_adapter": str(folder)})
    for key in with_it.unserved:
        raise ConfigError(
            f"lora.initial_adapter = {lora.initial_adapter!r} has {key} = {list(decided[key])}, which are no "
            'part of a served adapter; set lora.publish = "merged"'
        )
    if with_it.drops_out_of_experts:
        raise ConfigError(
            f"lora.dropout = {lora.dropout:g} is refused: the adapter in {lora.initial_adapter!r} has "
            "stacked experts; set lora.dropout = 0"
        )
    return with_it


def _decided_by(folder: Path, named: str) -> dict[str, Any]:
    try:
        found = adapter_config_of(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"lora.initial_adapter = {named!r} is refused: {error}") from error
    values = {key: getattr(found, name) for name, key in KEYS.items()}
    # A pattern of modules is nothing that the table could say.
    return {key: value for key, value in values.items() if value is not None}
