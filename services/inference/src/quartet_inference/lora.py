"""An adapter as the weight plane carries it: peft's adapter_config.json and tensors, fitted to the model.

1. Served are low-rank matrices beside linear modules that the model has, scaled as the configuration says.
   Whatever else peft knows (DoRA, modules trained in full, ranks that differ by module, ...) is refused by
   name: nothing of an adapter is left out silently. So are adapters whose beginning has changed the base
   model (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA): they belong to what was left of it.
2. An adapter whose names, shapes and dtypes fit the model fits as a whole (layout.py 3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor

from quartet_inference.layout import Layout, fits

#: What peft puts before the names of the model.
PREFIX = "base_model.model."
_LOW, _HIGH = ".lora_A.weight", ".lora_B.weight"
#: Settings that change what an adapter computes, and the values with which they change nothing.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # These begin an adapter and leave the base model as it is.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
    "kasa_config": (None,),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


@dataclass(frozen=True)
class LoraTensors:
    """A checked adapter: the output of a module gets scale * high @ (low @ input) added to it."""

    rank: int
    scale: float
    #: By the module's name in the model: low [rank, in] and high [out, rank].
    modules: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""
        return sum(len(one.data) for pair in self.modules.values() for one in pair)


def read_adapter(config_json: str, tensors: Mapping[str, Tensor], layout: Layout) -> LoraTensors:
    """Check an adapter against the model's layout. Errors: INVALID_REQUEST."""
    rank, scale = _settings(config_json)
    modules: dict[str, tuple[Tensor, Tensor]] = {}
    left = set(tensors)
    for name in sorted(tensors):
        if not (name.startswith(PREFIX) and name.endswith(_LOW)):
            continue
        module = name.removeprefix(PREFIX).removesuffix(_LOW)
        pair = f"{PREFIX}{module}{_HIGH}"
        if pair not in tensors:
            raise _refused(f"{name} has no {_HIGH}", name)
        modules[module] = (tensors[name], tensors[pair])
        left -= {name, pair}
        _check(module, modules[module], rank, layout)
    if left:
        raise _refused(
            f"{min(left)} is no low-rank matrix of a linear module; publish merged weights", min(left)
        )
    if not modules:
        raise _refused("the adapter has no matrices", "")
    return LoraTensors(rank, scale, modules)


def _settings(config_json: str) -> tuple[int, float]:
    try:
        config = json.loads(config_json)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _refused(f"adapter_config is not peft's: {error!r}", config_json[:100]) from error
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise _refused(
                f"adapter_config.{key} = {config[key]!r} is not served; publish merged weights", key
            )
    if rank < 1 or not math.isfinite(alpha):
        raise _refused(f"adapter_config has r = {rank} and lora_alpha = {alpha}", "r")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check(module: str, pair: tuple[Tensor, Tensor], rank: int, layout: Layout) -> None:
    held = layout.get(f"{module}.weight")
    if held is None or len(held[1]) != 2:
        raise _refused(f"the model has no linear module {module} of its own", module)
    dtype, (rows, columns) = held
    for tensor, shape in zip(pair, ((rank, columns), (rows, rank)), strict=True):
        if not fits((tensor.dtype, tensor.shape), (dtype, shape)):
            raise _refused(
                f"a matrix of {module} is {tensor.dtype} {list(tensor.shape)}, the model needs {dtype} "
                f"{list(shape)}",
                module,
            )


def _refused(message: str, value: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"adapter refused: {message}",
        field="adapter",
        value=value,
        remedy="publish an adapter for the model that is served here, or merged weights",
    )
