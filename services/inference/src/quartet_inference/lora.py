"""An adapter as the weight plane carries it: peft's adapter_config.json and tensors, fitted to the model.

1. Served are low-rank matrices beside linear modules that the model has, scaled as the configuration says.
   Whatever else peft knows (DoRA, modules trained in full, ranks that differ by module, ...) is refused by
   name: nothing of an adapter is left out silently. So are adapters whose beginning has changed the base
   model (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA): they belong to what was left of it.
2. An adapter whose names, shapes and dtypes fit the model fits as a whole (layout.py 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quartet.adapter_config import read_adapter_config
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor

from quartet_inference.layout import Layout, fits

#: What peft puts before the names of the model.
PREFIX = "base_model.model."
_LOW, _HIGH = ".lora_A.weight", ".lora_B.weight"


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
        config = read_adapter_config(config_json)
    except ValueError as error:
        raise _refused(str(error), config_json[:100]) from error
    whole = {"modules_to_save": config.modules_to_save, "target_parameters": config.target_parameters}
    more = {key: list(names) for key, names in whole.items() if names}
    if beyond := [*config.beyond.items(), *more.items()]:
        key, value = beyond[0]
        raise _refused(f"adapter_config.{key} = {value!r} is not served; publish merged weights", key)
    return config.rank, config.scale


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
