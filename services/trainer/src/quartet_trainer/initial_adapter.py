"""The adapter that a run's own begins with (LoraSpec.initial_adapter): a folder as peft saves it.

1. The run begins with its weights, all of them and no others, scaled as there. The rest is the run's own:
   version 0, optimizer, seed, dropout, and a reference that is the base without any adapter.
2. What does not fit is refused: by the key of the run that would have to be another, with what the folder has
   there; or by the setting of the folder that no adapter here has (DoRA, ranks that differ by module, ...).
3. It is only read, from safetensors, and once, of several ranks by the first: a run that has a state of its
   own does not need it any more. Until then a folder that has become another one gives other versions, as a
   changed base_model does.
4. Of the base's own weights peft saves copies with an adapter of an untied head, or where it is told to. They
   are left out, also rounded to a narrower type; with other values they are refused.
5. That it was made for this base model nobody can see but by its shapes: peft does not write down more.
"""

from __future__ import annotations

from pathlib import Path

import torch
from quartet.adapter_config import WEIGHTS as FILE
from quartet.adapter_config import AdapterConfig, adapter_config_of, some_of
from quartet.errors import QuartetError
from quartet.kit.folder import unreadable_part
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quartet_trainer.content import WEIGHTS, Content
from quartet_trainer.frozen import plain_name
from quartet_trainer.ranks.layout import whole
from quartet_trainer.spec import LoraSpec, RunSpec
from quartet_trainer.trained import Masters, Trained
from quartet_trainer.wire.refusal import config

KEY = "lora.initial_adapter"
#: What a model is loaded in by whoever makes an adapter of it: its weights are saved as they were then.
_LOADED = (torch.float32, torch.bfloat16, torch.float16)
#: Of what a run says of an adapter: peft's words, where they are others.
_PEFTS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}


def initial_adapter(spec: RunSpec) -> Path | None:
    """The folder of the adapter that the run's begins with, if with one; its settings fit. Errors:
    INVALID_CONFIG."""
    if spec.lora is None or not spec.lora.initial_adapter:
        return None
    named = spec.lora.initial_adapter
    folder = Path(named)
    try:
        if (part := unreadable_part(folder)) is not None:
            raise config(KEY, named, f"this user cannot read {part}; let it (chmod -R a+rX)")
        found = adapter_config_of(folder)
    except OSError as error:  # too long for a name, or another user's alone
        raise config(KEY, named, f"it cannot be read: {error.strerror}; name another folder") from error
    except ValueError as error:
        raise config(KEY, named, str(error)) from error
    _check_settings(spec.lora, found)
    return folder


def read_adapter(folder: Path) -> Content:
    """Its weights, in float32. Errors: INVALID_CONFIG."""
    try:
        tensors = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        why = f"{folder / FILE} cannot be read: {error}; save the adapter again"
        raise config(KEY, str(folder), why) from error
    weights = {name: one.float() for name, one in tensors.items() if one.is_floating_point()}
    unusable = [name for name in sorted(tensors) if name not in weights or not weights[name].isfinite().all()]
    if unusable:
        why = f"{unusable[0]} in {folder / FILE} is {_kind(tensors[unusable[0]])}; save the adapter again"
        raise config(KEY, str(folder), why)
    return Content({}, {WEIGHTS: weights}, folder)


def _kind(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return f"of {str(tensor.dtype).removeprefix('torch.')}, where numbers of a floating point are wanted"
    return "not finite in float32"


def without_copies(spec: LoraSpec, weights: Masters, trained: Trained) -> Masters:
    """An adapter's weights but for those of its base. In all ranks at once. Errors: INVALID_CONFIG."""
    frozen, rest = trained.frozen(), dict(weights)
    for name in sorted(weights.keys() - trained.parameters.keys()):
        held = frozen.get(plain_name(name))
        if held is None or held.shape != weights[name].shape:
            continue  # no copy: `check_tensors` refuses it
        if not _is_copy(rest.pop(name), whole(held.detach())):
            why = (
                f"its {name} has other values than base_model, of which it would be a copy; name the base "
                "model that it was made for, or merge the adapter into a model, and name that"
            )
            raise config(KEY, spec.initial_adapter, why)
    return rest


def _is_copy(copy: Tensor, held: Tensor) -> bool:
    plain = held.to(copy.device).float()
    return any(torch.equal(copy, plain.to(dtype).float()) for dtype in _LOADED)


def check_tensors(spec: LoraSpec, weights: Masters, parameters: Masters) -> None:
    """Whether an adapter has the matrices that the run trains, and no others. Errors: INVALID_CONFIG."""
    of_stacks, wanted_stacks = (_stacks(spec, one) for one in (weights, parameters))
    if of_stacks != wanted_stacks:
        why = "it has matrices of other stacks of experts; set what its adapter_config.json names"
        raise _unfit(spec, "target_parameters", list(spec.target_parameters), why)
    theirs, ours = _modules(weights) - of_stacks, _modules(parameters) - wanted_stacks
    if theirs != ours:
        if not theirs:
            why = "it has no matrices of linear modules, and a run trains some; merge it into base_model"
            raise config(KEY, spec.initial_adapter, why)
        short, wanted = (sorted({one.rpartition(".")[2] for one in of}) for of in (theirs, ours))
        listed = ", ".join(f'"{name}"' for name in short)
        if short != wanted:
            why = (
                f"it has matrices of {some_of(short)}, the run would train {some_of(wanted)}; set [{listed}]"
            )
            raise _unfit(spec, "target_modules", list(spec.target_modules), why)
        if missing := sorted(ours - theirs):
            told = f"has no matrices of {some_of(missing)}, and the run would train some"
        else:
            told = f"has matrices of {some_of(sorted(theirs - ours))}, and the run would have none there"
        why = f"it {told}; name target_modules by their whole names, or another base_model"
        raise _unfit(spec, "target_modules", list(spec.target_modules), why)
    if rest := sorted(set(weights) ^ set(parameters)):
        which = "has" if rest[0] in weights else "lacks"
        why = f"it {which} {rest[0]}, unlike what the run trains; name another, or merge it into base_model"
        raise config(KEY, spec.initial_adapter, why)
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            shape, needed = list(weights[name].shape), list(parameter.shape)
            why = (
                f"{name} has shape {shape}, and base_model needs {needed}; name the base model that it was "
                "made for, or another adapter"
            )
            raise config(KEY, spec.initial_adapter, why)


def _check_settings(spec: LoraSpec, found: AdapterConfig) -> None:
    for why in found.refusals():
        raise config(KEY, spec.initial_adapter, why)
    unlike = found.unlike(spec.rank, spec.alpha, spec.rslora, spec.modules_to_save, spec.target_parameters)
    for key, (ours, theirs) in unlike.items():
        told = f"{theirs:g}" if key == "alpha" else theirs
        raise _unfit(spec, key, ours, f"it has {_PEFTS.get(key, key)} = {told}; set that")


def _modules(weights: Masters) -> set[str]:
    """Those with low-rank matrices."""
    return {name.partition(".lora_")[0] for name in weights if ".lora_" in name}


def _stacks(spec: LoraSpec, weights: Masters) -> set[str]:
    """Those with the matrices of several experts, one behind the other."""
    low = ".lora_A.weight"
    named = {name.removesuffix(low): one for name, one in weights.items() if name.endswith(low)}
    return {module for module, one in named.items() if len(one) != spec.rank}


def _unfit(spec: LoraSpec, key: str, value: object, why: str) -> QuartetError:
    return config(f"lora.{key}", value, f"the run begins with the adapter in {spec.initial_adapter}: {why}")
