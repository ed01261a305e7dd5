"""A model that a script has loaded itself, by transformers: of which folder it is.

1. It is taken where it is, weight by weight and setting by setting, what its folder holds: that is what the
   services load. What was changed in memory would be lost, and is refused, with the first change; so is a
   `forward` that is not its class's. Hooks of accelerate, which move it between devices, change nothing.
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
#: What to do about the types of its weights.
ONE_TYPE = 'load all of it with one: dtype=torch.float32 or torch.bfloat16, or "auto", which is its folder\'s'


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
    kind = type(model).__name__
    if why := _never_is(model, name):
        raise ConfigError(f"model = {kind} is refused: {why}")
    there = type(model).from_pretrained(folder, dtype=model.dtype)
    given, stored = model.state_dict(), there.state_dict()
    if why := _of_several_types(given, stored):
        raise ConfigError(f"model = {kind} is refused: {why}")
    changed = _changed_setting(model.config.to_dict(), there.config.to_dict())
    if changed := changed or _changed_weight(given, stored):
        raise ConfigError(
            f"model = {kind} is refused: it is not what {name!r} holds, from which the services load it "
            f"({changed}); {_saved(kind)}"
        )


def _never_is(model: Any, name: str) -> str:
    """Why no folder holds such a model; empty where one may."""
    if getattr(model, "hf_quantizer", None) is not None:
        return f"its weights are quantized; give {name!r}, whose weights are trained as they are there"
    if not model.can_generate():
        return (
            "it has no head that tokens are sampled from; load it by AutoModelForCausalLM.from_pretrained("
            f"{name!r}), or give that name"
        )
    if model.dtype.itemsize == 1:  # nothing computes with it, and from_pretrained makes none
        return f"its weights are {_type(model)}; {ONE_TYPE}"
    replaced = next((where for where, module in model.named_modules() if _is_replaced(module)), None)
    if replaced is not None:
        called = f"{replaced}.forward" if replaced else "forward"
        return (
            f"its {called} is another one than that of its class, with which the services load {name!r}; "
            "give the model without that, for it would be lost"
        )
    return ""


def _is_replaced(module: Any) -> bool:
    """Whether somebody put a `forward` into it."""
    # Accelerate puts one of its own in front of what was there.
    own = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _of_several_types(given: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    for name in sorted({*given} & {*there}):
        if given[name].dtype != there[name].dtype:
            return f"{name} is {_type(given[name])}, and the others are {_type(there[name])}; {ONE_TYPE}"
    return ""


def _type(of: Any) -> str:
    return str(of.dtype).removeprefix("torch.")


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
