"""A model that a script has loaded itself, by transformers: of which folder it is.

1. It is taken where it is, weight by weight and setting by setting, what its folder holds: that is what the
   services load. What was changed in memory would be lost, and is refused, with the first change.
2. Neither torch nor transformers is imported: who has such a model has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.config.model import ConfigError

#: Settings of a model that are of the process it is in, or of how it generates: nothing here goes by them.
OF_THE_PROCESS = frozenset(
    {
        *("_name_or_path", "_attn_implementation", "attn_implementation", "_experts_implementation"),
        *("dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id"),
    }
)


def name_of_loaded(model: Any) -> str | None:
    """The name by which a model of transformers was loaded; None for anything else. Raises ConfigError."""
    named, loads = getattr(model, "name_or_path", None), getattr(type(model), "from_pretrained", None)
    if not isinstance(named, str) or loads is None or not hasattr(model, "state_dict"):
        return None
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"model = {kind} is refused: it has adapters; give the model without them, and an adapter that "
            "is to be trained as peft_config"
        )
    if not named:
        raise ConfigError(f"model = {kind} is refused: it was loaded from no folder; {_saved(kind)}")
    return named


def check_unchanged(model: Any, name: str, folder: str) -> None:
    """Whether it is what the folder holds, which is loaded once more for that. Raises ConfigError."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"model = {type(model).__name__} is refused: its weights are quantized; give {name!r}, whose "
            "weights are trained as they are there"
        )
    there = type(model).from_pretrained(folder, dtype=model.dtype)
    changed = _changed_setting(model.config.to_dict(), there.config.to_dict())
    changed = changed or _changed_weight(model.state_dict(), there.state_dict())
    if changed:
        raise ConfigError(
            f"model = {type(model).__name__} is refused: it is not what {name!r} holds, from which the "
            f"services load it ({changed}); {_saved(type(model).__name__)}"
        )


def _changed_setting(given: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    for key in sorted({*given, *there} - OF_THE_PROCESS):
        if given.get(key) != there.get(key):
            return f"config.{key} is {given.get(key)!r}, there {there.get(key)!r}"
    return ""


def _changed_weight(given: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    for name in sorted({*given, *there}):
        if name not in given or name not in there:
            return f"{name} is {'there alone' if name in there else 'not there'}"
        if given[name].is_meta:
            return f"{name} is not in memory"
        if not given[name].cpu().equal(there[name].cpu()):
            return f"{name} has other values"
    return ""


def _saved(kind: str) -> str:
    return f"save the {kind} and its tokenizer with save_pretrained into one folder, and give that as model"
