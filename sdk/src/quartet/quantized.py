"""Models whose checkpoint is quantized, as trainer and embedded engine load them with transformers.

1. What transformers can widen as it loads it (WIDENED) is widened, on every device: where a GPU could compute
   with it as it is, transformers would leave it so, nothing would learn, and no version would fit.
2. Any other is refused, and so is one of which the scales are not read, or its last blocks are smaller than
   the others (transformers divides a matrix evenly among its scales): its weights would be others.
3. So is one that has an adapter beside it, which transformers would load too: upon it, from a pickled file as
   well, or with the model that the adapter names in its place.
4. The configuration of what was widened, or made of random weights, says nothing of it: an exported folder
   holds whole weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from quartet.adapter_config import SETTINGS
from quartet.weights.layout import read_header

#: Methods by which a checkpoint may be quantized and that transformers undoes, by means of accelerate.
WIDENED: Final = ("fp8", "mxfp4")
#: Of 8 bits, as safetensors calls them; a file may have others beside them, in blocks of their own.
EIGHT_BITS: Final = "F8_E4M3"
#: Ends the name of a tensor of scales, behind that of its weight.
_SCALE: Final = re.compile(r"(?:_scale_inv|(?<=weight)_scale)$")
#: Of whatever is wrong with quantized weights.
REMEDY: Final = "name the model that it was made of, in bfloat16 or float32"


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies beside a model."""
    return (folder / SETTINGS).is_file()


def refusal(config: Any, folder: Path) -> tuple[str, str] | None:
    """Why weights of this configuration and folder are not loaded, and the remedy; None if none is known."""
    if has_adapter(folder):
        return f"an adapter lies beside it ({SETTINGS}), and would be loaded with it", "move that elsewhere"
    settings = [one.quantization_config for one in _holders(config)]
    other = [one.get("quant_method") for one in settings if one.get("quant_method") not in WIDENED]
    if other:
        return f"its weights are quantized ({other[0] or 'by no quant_method that it names'})", REMEDY
    blocks = [one["weight_block_size"] for one in settings if one.get("weight_block_size")]
    ragged = _ragged(folder, blocks[0]) if blocks else ""
    return (f"{ragged} is quantized in blocks that do not divide it", REMEDY) if ragged else None


def unread(config: Any, unexpected: Iterable[str]) -> str:
    """Why a checkpoint of this configuration, of which these tensors were not read, is not what it was; empty
    where it is."""
    names = set(unexpected)
    # Of a layer that the class does not have, the weight is not read either.
    scales = sorted(name for name in names if _SCALE.search(name) and _SCALE.sub("", name) not in names)
    if not scales or not _holders(config):
        return ""
    return f"transformers does not read the scales of its quantized weights, the first is {scales[0]}"


def widening(config: Any) -> Any:
    """The configuration, to load by."""
    for one in _holders(config):
        one.quantization_config = {**one.quantization_config, "dequantize": True}
    return config


def plain(config: Any) -> Any:
    """The configuration, as that of whole weights."""
    for one in _holders(config):
        del one.quantization_config
    return config


def _ragged(folder: Path, block: Iterable[int]) -> str:
    """The first matrix of which the last rows or columns are less than a block; empty where there is none."""
    kinds: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
            kinds |= read_header(file)[1]
    for name, kind in kinds.items():
        weight = kinds.get(_SCALE.sub("", name), {})
        if not _SCALE.search(name) or weight.get("dtype") != EIGHT_BITS:
            continue
        for count, size, edge in zip(kind["shape"][-2:], weight["shape"][-2:], block, strict=False):
            if count not in (1, size / edge):
                return _SCALE.sub("", name)
    return ""


def _holders(config: Any) -> list[Any]:
    """The configurations that say how weights are quantized: of the whole, or of its language model."""
    parts = {id(one): one for one in (config, config.get_text_config())}
    return [one for one in parts.values() if getattr(one, "quantization_config", None)]
