"""The adapter of a script: LoRA by the names of peft.

1. `peft_config` may be peft's own LoraConfig: a dataclass of the same field names, read as such. What it says
   beyond the keys of [lora] must be its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.model import ConfigError
from quartet.run.lora import ALL_LINEAR

#: Of peft's LoraConfig, what a run's [lora] table says.
LORA_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
}
#: Fields of peft that say what the adapter is for and where it is from, not what it computes.
OF_PEFT_ITSELF = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "runtime_config",
)


@dataclass
class LoraConfig:
    """LoRA, by the names of peft."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str | None = None
    target_parameters: Sequence[str] | None = None
    use_rslora: bool = False
    modules_to_save: Sequence[str] | None = None
    task_type: str | None = None
    inference_mode: bool = False
    # And what scripts say of peft's at its defaults; anything else is refused (lora_table).
    bias: str = "none"
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    use_dora: bool = False
    layers_to_transform: Sequence[int] | int | None = None
    exclude_modules: Sequence[str] | str | None = None


def lora_table(peft_config: Any) -> dict[str, Any]:
    """The [lora] table of an adapter. Raises ConfigError."""
    if not dataclasses.is_dataclass(peft_config) or isinstance(peft_config, type):
        raise ConfigError(
            f"peft_config = {peft_config!r} is no LoraConfig; give the one that is here, or peft's"
        )
    values = {one.name: getattr(peft_config, one.name) for one in dataclasses.fields(peft_config)}
    if missing := [name for name in ("r", "lora_alpha") if values.get(name) is None]:
        raise ConfigError(
            f"peft_config = {type(peft_config).__name__} has no {missing[0]}; only LoRA is trained here"
        )
    for one in dataclasses.fields(peft_config):
        made = one.default_factory() if callable(one.default_factory) else one.default
        # peft makes some that are given as None into what they mean by themselves.
        if one.name in (*LORA_KEYS, *OF_PEFT_ITSELF) or values[one.name] in (None, made):
            continue
        raise ConfigError(
            f"peft_config: {one.name} = {values[one.name]!r} is refused: [lora] has no such key; leave it out"
        )
    table = {key: values[name] for name, key in LORA_KEYS.items() if values.get(name) is not None}
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        if key in table:
            table[key] = _modules(key, table[key])
    merges = table.get("modules_to_save") or table.get("target_parameters")
    publish = {"publish": "merged"} if merges else {}
    return {"enabled": True, **table, **publish}


def unnamed_modules(lora: Mapping[str, Any]) -> list[str]:
    """What a script is told where it leaves to peft which modules its adapter is of."""
    if "target_modules" in lora:
        return []
    return [
        "peft_config: target_modules = None is every linear module but the head here, and of peft those that "
        "it knows for the model's type, such as q_proj and v_proj; name them"
    ]


def _modules(key: str, value: Any) -> list[str] | str:
    """Names of modules, or peft's word for all. Raises ConfigError."""
    if key == "target_modules" and value == ALL_LINEAR:
        return ALL_LINEAR
    if isinstance(value, str):
        raise ConfigError(f"peft_config: {key} = {value!r} is a pattern; list the names of modules")
    if not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"peft_config: {key} = {value!r} is refused: list the names of modules")
    return sorted(value)
