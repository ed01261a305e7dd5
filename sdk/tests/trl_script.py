"""The run that arguments of a script of TRL become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.scripts.models import Model
from quartet.trl import GRPOConfig
from quartet.trl.translate import Data, OfTrl, translate

ADDRESS = "unix:/tmp/quartet-rewards-0/socket"
PROMPTS = 100


def translated(
    *,
    peft_config: Any = None,
    evaluation: int = 10,
    weights: Mapping[str, float] = {},
    has_tools: bool = False,
    **given: Any,
) -> OfTrl:
    data = Data(PROMPTS, evaluation, ADDRESS, weights, has_tools)
    return translate(GRPOConfig(**given), Model("m", "/m"), data, peft_config, context=2048)
