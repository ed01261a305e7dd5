"""Models whose checkpoint is quantized, as trainer and embedded engine load them with transformers.

1. What transformers can widen as it loads it (WIDENED) is widened, on every device: where a GPU could compute
   with it as it is, transformers would leave it so, nothing would learn, and no version would fit.
2. Any other is refused, and so is one of which the scales are not read: its weights would be others.
3. The configuration of what was widened, or made of random weights, says nothing of it: an exported folder
   holds whole weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

#: Methods by which a checkpoint may be quantized and that need nothing else installed to be undone.
WIDENED: Final = ("fp8", "mxfp4")
REMEDY: Final = "name the model that it was made of, in bfloat16 or float32"


def refusal(config: Any) -> str:
    """Why weights of this configuration are not loaded; empty where nothing is known."""
    methods = [one.quantization_config.get("quant_method") for one in _holders(config)]
    other = [method for method in methods if method not in WIDENED]
    return f"its weights are quantized ({other[0] or 'by no quant_method that it names'})" if other else ""


def unread(config: Any, unexpected: Iterable[str]) -> str:
    """Why a checkpoint of this configuration, of which these tensors were not read, is not what it was; empty
    where it is."""
    scales = sorted(name for name in unexpected if "weight_scale" in name)
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


def _holders(config: Any) -> list[Any]:
    """The configurations that say how weights are quantized: of the whole, or of its language model."""
    parts = {id(one): one for one in (config, config.get_text_config())}
    return [one for one in parts.values() if getattr(one, "quantization_config", None)]
