"""What a model makes of the products of its output layer before they are its logits, by its configuration.

1. A scale is one with the temperature: both divide.
2. A cap bends logits beyond it: cap * tanh(logits / cap).
3. What a configuration says here and a model does otherwise, probe.py finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Settings whose value multiplies, and whose value divides.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
#: A model type whose divisor multiplies.
MULTIPLIES = "hyperclovax"


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How logits follow from products: divided, then bent."""

    divisor: float = 1.0
    cap: float | None = None


def logit_rule(config: Any) -> LogitRule:
    """What a configuration says."""
    text = config.get_text_config()
    divisor = 1.0
    for name in (*MULTIPLIERS, *DIVISORS):
        value = float(getattr(text, name, None) or 1.0)
        divides = name in DIVISORS and text.model_type != MULTIPLIES
        divisor *= value if divides else 1.0 / value
    return LogitRule(divisor, next((float(cap) for name in CAPS if (cap := getattr(text, name, None))), None))
