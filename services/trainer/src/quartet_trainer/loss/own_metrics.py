"""What a loss of one's own reports about a batch, by names of its own.

1. Each is a mean over covered tokens, as all diagnostics are; where a name ends with "_max" the largest. So
   it does not depend on how a batch was cut into micro-batches, but by rounding.
2. No name is one that a step has anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Final

import numpy as np
from torch import Tensor

#: More are no metrics of a loss.
MAX_METRICS: Final = 64
NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
#: What the trainer and the orchestrator say of every step.
TAKEN: Final = frozenset(
    {
        *("clipped_fraction", "correction_bounded_fraction", "correction_mean", "effective_sample_size"),
        *("entropy_coef", "off_policy_masked_fraction", "top_entropy_fraction", "top_entropy_threshold"),
        *("entropy", "grad_norm", "kl_coef", "kl_divergence", "learning_rate", "logprob_difference_max"),
        *("logprob_difference_by_replica", "logprob_difference_mean", "logprob_mean"),
        *("logprob_tokens_compared", "logprob_tokens_skipped"),
        *("loss", "loss_tokens", "mismatch_kl", "mismatch_max", "mismatch_mean", "ratio_max", "ratio_mean"),
        *("reference_kl", "replayed_fraction", "reward", "reward_std", "router_entropy", "router_load_max"),
        *("router_load_violation", "router_unused_experts", "skipped_steps", "tokens", "versions_changed"),
    }
)


class OwnMetrics:
    """Those of a batch, as far as they were reported."""

    def __init__(self) -> None:
        """None yet."""
        # By name: the sum over tokens, or the largest, and how many tokens.
        self._found: dict[str, tuple[float, int]] = {}

    def report(self, metrics: object, tokens: int) -> str:
        """Take those of a micro-batch of so many covered tokens. What is wrong with them; empty where nothing
        is."""
        if not isinstance(metrics, Mapping):
            return f"its metrics are {type(metrics).__name__}, not a dict of numbers by name"
        for name, value in metrics.items():
            if wrong := self._wrong(name, value, tokens):
                return wrong
            try:
                total, largest = _of_tokens(value, tokens)
            except OverflowError:
                return f"its metric {name!r} is larger than any float"
            self._add(str(name), largest if str(name).endswith("_max") else total, tokens)
        return "" if len(self._found) <= MAX_METRICS else f"it reports more than {MAX_METRICS} metrics"

    def values(self) -> dict[str, float]:
        """By name."""
        return {
            name: value if name.endswith("_max") else value / tokens
            for name, (value, tokens) in self._found.items()
        }

    @property
    def found(self) -> dict[str, tuple[float, int]]:
        """For other processes, to be joined there."""
        return dict(self._found)

    def join(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """What all processes found, in one order, in the place of what this one did."""
        self._found = {}
        for part in parts:
            for name, (value, tokens) in part.items():
                self._add(name, value, tokens)

    def _add(self, name: str, value: float, tokens: int) -> None:
        if name not in self._found:
            self._found[name] = value, tokens
            return
        before, counted = self._found[name]
        # Of max() it would depend on the order whether what is no number stays.
        joined = float(np.maximum(before, value)) if name.endswith("_max") else before + value
        self._found[name] = joined, counted + tokens

    def _wrong(self, name: object, value: object, tokens: int) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"the name of its metric {name!r} is not 1-64 of [A-Za-z0-9_.-], a letter first"
        if name in TAKEN:
            return f"its metric {name!r} is one that every step has; call it otherwise"
        kind = type(value).__name__
        if isinstance(value, Tensor):
            if value.shape in ((), (tokens,)) and not value.is_complex():
                return ""
            kind = f"{'complex ' if value.is_complex() else ''}{kind} of shape {tuple(value.shape)}"
        elif isinstance(value, Real):
            return ""
        return f"its metric {name!r} is {kind}, not a number, nor one for each of {tokens} tokens"


def _of_tokens(value: Any, tokens: int) -> tuple[float, float]:
    """The sum over the tokens, and the largest."""
    if isinstance(value, Tensor) and value.shape:
        values = value.detach().double()
        return float(values.sum()), float(values.max())
    return float(value) * tokens, float(value)
