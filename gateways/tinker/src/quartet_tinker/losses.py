"""Tinker's losses of a token as functions of its log-probability, with their derivatives.

A loss that is a sum over tokens of f(logp) has the gradient of sum(f'(logp) * logp), where f' is taken as a
number. So one call gives the trainer the gradient of each of them: cross-entropy, with -f'(logp) as the
weight of each token. log-probabilities are those of Forward under the same weights, which the SDK is answered
with anyway. Thresholds of single tokens, dro and the lower clip of cispo have no LossSpec; this way they
need none, and none of the six is an approximation. Of gspo (GSPO-token) the ratio of a sequence is a number
to each of its tokens, too.

Shapes: T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from quartet_tinker.refusal import Refused

Floats = npt.NDArray[np.float64]

#: loss_fn -> its settings, with their defaults.
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    # NaN: to be given. Clips that fit the ratio of a sequence are far closer to 1 than those of a token.
    "gspo": {"clip_low_threshold": math.nan, "clip_high_threshold": math.nan},
}
#: loss_fn -> arrays that it needs, and those that it may have.
NEEDED: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), frozenset({"logprobs", "advantages"})),
    "gspo": frozenset({"logprobs", "advantages", "sequence_ratio_mask"}),
}
ALLOWED: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset({"weights"}),
    "importance_sampling": NEEDED["importance_sampling"],
    "ppo": NEEDED["ppo"] | {"clip_low_threshold", "clip_high_threshold"},
    "cispo": NEEDED["cispo"] | {"clip_low_threshold", "clip_high_threshold"},
    "dro": NEEDED["dro"],
    "gspo": NEEDED["gspo"],
}

#: loss_fn -> the arrays that are 0 where a position does not count; of dro every one counts.
CREDIT: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo"), ("advantages",)),
    "dro": (),
    "gspo": ("advantages", "sequence_ratio_mask"),
}


def settings(loss_fn: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss. Raises Refused."""
    if loss_fn not in SETTINGS:
        known = ", ".join([*SETTINGS, "forward_backward_custom"])
        raise Refused(f"loss_fn = {loss_fn!r} is not served here; use one of {known}")
    defaults = SETTINGS[loss_fn]
    for key, value in given.items():
        if key not in defaults:
            takes = ", ".join(defaults) or "none"
            raise Refused(f"loss_fn_config.{key} is no setting of {loss_fn}; it takes {takes}")
        if isinstance(value, str) or not np.isfinite(value):
            raise Refused(f"loss_fn_config.{key} = {value!r} is refused; give a finite number")
    chosen = {**defaults, **{key: float(value) for key, value in given.items()}}
    missing = [key for key, value in chosen.items() if math.isnan(value)]
    if missing:
        raise Refused(
            f"{loss_fn} needs loss_fn_config.{missing[0]} here; its authors clip at 0.9997 and 1.0004"
        )
    return chosen


def evaluated(
    loss_fn: str, config: Mapping[str, float], logp_T: Floats, inputs: Mapping[str, Floats]
) -> tuple[Floats, Floats]:
    """The loss of each token, and minus its derivative by the token's log-probability."""
    if loss_fn == "cross_entropy":
        weights_T = inputs.get("weights", np.ones_like(logp_T))
        return -weights_T * logp_T, weights_T
    moved_T, advantages_T = logp_T - inputs["logprobs"], inputs["advantages"]
    if loss_fn == "dro":
        beta = config["beta"]
        return 0.5 * beta * moved_T**2 - advantages_T * logp_T, advantages_T - beta * moved_T
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for what is not finite
        if loss_fn == "gspo":
            in_ratio_T = inputs["sequence_ratio_mask"] != 0
            moved_T = np.full_like(
                moved_T, np.divide(moved_T[in_ratio_T].sum(), np.count_nonzero(in_ratio_T))
            )
        ratio_T = np.exp(moved_T)
        gain_T = ratio_T * advantages_T
        if loss_fn == "importance_sampling":
            return -gain_T, gain_T
        low, high = (inputs.get(key, config[key]) for key in ("clip_low_threshold", "clip_high_threshold"))
        clipped_T = np.clip(ratio_T, low, high)
        if loss_fn == "cispo":
            return -clipped_T * advantages_T * logp_T, clipped_T * advantages_T
        assert loss_fn in ("ppo", "gspo"), loss_fn
        bounded_T = clipped_T * advantages_T
        # Where the clipped one is the smaller, the ratio no longer counts.
        return -np.minimum(gain_T, bounded_T), np.where(gain_T <= bounded_T, gain_T, 0.0)
