"""Named algorithms: values of the [algorithm] table, and nothing more. docs/algorithms.md has their formulas.

Whatever a preset sets can be set otherwise beside it. With another loss beside it, its clips are left out;
where an option or a later file names another loss, those of the files before. A later file that names the
same preset once more changes nothing.

1. One that was released never changes: journals have runs that say its name alone. Other values are a preset
   of another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import pydantic

from quartet.config import Config

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300; the divergence from a reference (there beta = 0.04) is off.
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence",
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "constant",
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token",
        "overlong_filtering": True,
        "dynamic_sampling": True,
    },
    # MiniMax-M1, arXiv 2506.13585
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_high": 4.0, "aggregation": "token"},
    # arXiv 2507.18071
    "gspo": {
        "advantage": "grpo",
        "loss": "ppo",
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence",
    },
    # arXiv 2602.05261: GSPO whose samples weigh by their lengths.
    "luspo": {
        "advantage": "grpo",
        "loss": "ppo",
        "ratio_level": "sequence",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "aggregation": "constant",
        "constant_tokens": 1,
    },
    # arXiv 2602.04879
    "dppo": {
        "advantage": "dr_grpo",
        "loss": "dppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token",
    },
    # arXiv 2511.20347
    "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": "sequence"},
    # arXiv 2602.10693
    "vespo": {"advantage": "grpo", "loss": "vespo", "aggregation": "token"},
    # arXiv 2402.14740; on-policy the truncated ratio is 1 and this is REINFORCE.
    "rloo": {"advantage": "rloo", "loss": "cispo", "aggregation": "token"},
    # REINFORCE++ with group baseline, arXiv 2501.03262
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token",
    },
    # MaxRL: Maximum Likelihood Reinforcement Learning, zanette-labs.github.io/MaxRL
    "max_rl": {"advantage": "max_rl", "loss": "cispo", "aggregation": "token"},
    # Likelihood of its own rollouts, weighted by their rewards: rejection sampling where these are 0 and 1.
    "sft": {"advantage": "none", "loss": "cross_entropy", "aggregation": "token"},
    # On-policy distillation, arXiv 2306.13649; the teacher is algorithm.reference.
    "opd": {"advantage": "zero", "loss": "cispo", "distill": True, "aggregation": "token"},
}


class PresetConfig(Config):
    """Which of them an [algorithm] begins with."""

    #: A set of values; every key that is given beside it wins.
    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "cispo",
            "gspo",
            "luspo",
            "dppo",
            "sapo",
            "vespo",
            "rloo",
            "reinforce_pp",
            "max_rl",
            "sft",
            "opd",
        ]
        | None
    ) = None

    @pydantic.field_validator("preset", mode="before")
    @classmethod
    def _is_no_loss(cls, preset: Any) -> Any:
        if preset == "ppo":
            raise ValueError(
                'there is no critic; loss = "ppo" is the clipped loss, which the preset "grpo" has'
            )
        return preset


#: Where neither a loss nor a preset is named.
DEFAULT_LOSS: Final = "cispo"
#: Of a preset, what belongs to its loss.
OF_THE_LOSS = ("clip_low", "clip_high", "tau_positive", "tau_negative", "kernel", "ratio_level")
#: Beside these, what a file may say that belongs to the loss before, ...
_CLIPS, _OF_CUSTOM = ("epsilon", "epsilon_high", "delta"), ("custom", "custom_args")
#: ... or to the advantage before.
_OF_ANOTHER = (*_CLIPS, *_OF_CUSTOM, "custom_advantage")
#: What belongs to the importance ratio of whichever loss, and the losses that have it.
_OF_A_RATIO = ("proximal", "correction", "kl_weighted", "off_policy_mask")
RATIO_LOSSES = ("cispo", "ppo", "dppo", "sapo", "vespo")
#: The same of every policy gradient.
_OF_A_POLICY_GRADIENT = ("top_entropy_quantile",)
POLICY_GRADIENTS = (*RATIO_LOSSES, "none")


def outdone_by(preset: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the [algorithm] of files that give way to what names this preset after them. Where the run's
    tables have another, what they say as that does is its: a run that was written down says all of it."""
    said, algorithm = _values_of(preset), before.get("algorithm", {})
    if not said or not isinstance(algorithm, Mapping):
        return ()
    former = _values_of(algorithm.get("preset"))
    written = (key for key, value in former.items() if algorithm.get(key) == value)
    return tuple(dict.fromkeys((*said, *written, *OF_THE_LOSS, *_OF_ANOTHER)))


def is_preset(preset: Any, before: Mapping[str, Any]) -> bool:
    """Whether files name this preset already."""
    algorithm = before.get("algorithm", {})
    return isinstance(algorithm, Mapping) and algorithm.get("preset") == preset


def outdone_by_loss(loss: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the [algorithm] of files that give way to what names this loss after them: none where the run's
    tables have it already."""
    said = before.get("algorithm", {})
    if not isinstance(said, Mapping) or loss == _loss_of(said):
        return ()
    unread = () if loss in RATIO_LOSSES else _OF_A_RATIO
    unread = unread if loss in POLICY_GRADIENTS else (*unread, *_OF_A_POLICY_GRADIENT)
    gone = (*OF_THE_LOSS, *_CLIPS, *unread)
    return gone if loss == "custom" else (*gone, *_OF_CUSTOM)


def outdone_by_epsilon(before: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the [algorithm] of files that give way to an epsilon after them: alone it sets both clips, so
    clip_high does unless it was said apart. A run that was written down says it in any case: as clip_low, or
    as its preset has it."""
    said = before.get("algorithm", {})
    if not isinstance(said, Mapping):
        return ()
    low, high = said.get("clip_low"), said.get("clip_high")
    is_apart = high not in (low, _values_of(said.get("preset")).get("clip_high"))
    return ("clip_low",) if is_apart else ("clip_low", "clip_high")


def _values_of(preset: Any) -> Mapping[str, Any]:
    return PRESETS.get(preset, {}) if isinstance(preset, str) else {}


def _loss_of(algorithm: Mapping[str, Any]) -> Any:
    return algorithm.get("loss", _values_of(algorithm.get("preset")).get("loss", DEFAULT_LOSS))
