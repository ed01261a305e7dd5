"""What of a run has to be as in the saved state that it begins with, which says so itself (run.json).

1. What [lora] leaves out of an adapter's shape is the state's, and is written down with the run. What it says
   otherwise is refused, all of it at once: the matrices would not fit, or be scaled otherwise than they were.
2. A state of a whole model begins no adapter, nor the other way round. Nothing switches [lora] on by itself:
   what is trained, the run says.
3. Of a state that cannot be read here the trainer says what is wrong, which also checks its digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quartet.cli.adapter_fit import KEYS, other_than
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.config import RunConfig
from quartet.run.lora import LoraConfig

#: In the folder of a state: what its run was.
META: Final = "run.json"


def left_out_of(lora: LoraConfig, begun: LoraConfig) -> LoraConfig:
    """The table, with what it leaves out as the run was begun."""
    decided = {key: getattr(begun, key) for key in KEYS.values() if key not in lora.model_fields_set}
    return lora.model_copy(update=decided if lora.enabled else {})


def fitting(config: RunConfig, state: Path, named: str) -> LoraConfig:
    """The run's [lora], with what it leaves out as in the state. Raises ConfigError."""
    try:
        spec = json.loads((state / META).read_text(encoding="utf-8"))["spec"]
        held, optimizer = spec["lora"], str(spec["optimizer"]["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return config.lora
    refused = []
    if config.initial_optimizer != "fresh" and config.optimizer != optimizer:
        refused.append(
            _refused(
                named,
                f'its moments are those of {optimizer}, and optimizer = "{config.optimizer}"; set optimizer '
                f'to "{optimizer}", or initial_optimizer to "fresh" for its weights alone',
            )
        )
    lora = config.lora
    if held is None and lora.enabled:
        refused.append(
            _refused(
                named,
                "it is of a whole model, and lora.enabled = true trains an adapter; write that model with "
                f"'quartet export {named} MODEL_FOLDER' and set model to it, or leave [lora] out",
            )
        )
    elif held is not None and not lora.enabled:
        refused.append(
            _refused(
                named,
                f"it is of an adapter (r = {held['rank']}), and this run trains the whole model; set "
                "lora.enabled = true, and r, alpha and the modules are taken from it",
            )
        )
    elif held is not None:
        refused += _misfits(lora, held, named)
        lora = lora.model_copy(update=_left_out(lora, held))
        refused += [
            _refused(named, f'it has {key}, no part of a served adapter; set lora.publish = "merged"')
            for key in lora.unserved
        ]
        if lora.drops_out_of_experts:
            refused.append(_refused(named, "it has stacked experts; set lora.dropout = 0"))
    if refused:
        raise together(refused)
    return lora


def _left_out(lora: LoraConfig, held: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: held[name] for name, key in KEYS.items() if name in held}
    plain = {key: tuple(one) if isinstance(one, list) else one for key, one in values.items()}
    return {key: one for key, one in plain.items() if key not in lora.model_fields_set}


def _misfits(lora: LoraConfig, held: Mapping[str, Any], named: str) -> list[ConfigError]:
    said = {name: key for name, key in KEYS.items() if name in held and key in lora.model_fields_set}
    return [
        other_than(key, ours, held[name], f"initial_state = {named!r}")
        for name, key in said.items()
        if _differ(key, ours := getattr(lora, key), held[name])
    ]


def _differ(key: str, ours: Any, theirs: Any) -> bool:
    """Whether they cannot mean the same. A module has names of several lengths, and which all linear ones are
    the trainer knows."""
    if not isinstance(theirs, list):
        return bool(ours != theirs)
    if key == "target_modules" and not (ours and theirs):
        return False
    endings = [{name.rpartition(".")[2] for name in names} for names in (ours, theirs)]
    return endings[0] != endings[1]


def _refused(named: str, why: str) -> ConfigError:
    text = f"initial_state = {named!r} is refused: {why}"
    return ConfigError(text, key="initial_state", value=named, remedy=why)
