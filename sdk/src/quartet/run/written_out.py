"""A run with its defaults written out: what it is computed with, whether somebody said so or not.

1. Two runs have one such form where one says what the other leaves out, and only there.
2. A preset is its values, so its name decides nothing. One that another release makes otherwise is another
   value here, and told as such.
3. What a default is that only the machine knows (compute_dtype) stays left out.
"""

from __future__ import annotations

from typing import Any, Final

from quartet.run.algorithm import AlgorithmConfig
from quartet.run.algorithm_tables import KernelConfig
from quartet.run.config import SHOWN, RunConfig
from quartet.run.credit import DEFAULT_RESAMPLE
from quartet.run.kl_penalty import KlPenaltyConfig
from quartet.run.learning import LearningConfig
from quartet.run.sampling import PENALTIES, SamplingConfig

#: Of each loss, the keys that it reads and what the trainer takes where they are left out.
OF_LOSSES: Final[dict[str, dict[str, Any]]] = {
    "cispo": {"clip_high": 4.0},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "dppo": {"clip_low": 0.2, "clip_high": 0.2},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "vespo": {"kernel": KernelConfig()},
}
MOMENTUM: Final[dict[str, float]] = {"muon": 0.95, "sgd": 0.9}
ENTROPY_COEF_DELTA: Final = 0.005
#: What a reference that follows the policy gets of it.
MIXUP_ALPHA: Final = 1.0
#: Of rollouts to learn from, what a request that leaves them out is sampled with.
OF_SAMPLING: Final[dict[str, Any]] = {"min_tokens": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **PENALTIES}


def written_out(run: RunConfig) -> RunConfig:
    """The same run, so written. No rule is checked again: an empty key may belong beside another."""
    measured = tuple(
        env.model_copy(
            update={
                "name": env.label,
                "num_examples": env.num_examples or run.eval.num_examples,
                "rollouts_per_example": env.rollouts_per_example or run.eval.rollouts_per_example,
            }
        )
        for env in run.eval.env
    )
    return run.model_copy(
        update={
            "on_environment_change": run.on_environment_change or "warn",
            "served_dtype": run.served_dtype or run.compute_dtype,
            **_of_the_optimizer(run),
            "sampling": _sampling(run.sampling),
            "env": tuple(env.model_copy(update={"name": env.label}) for env in run.env),
            "eval": run.eval.model_copy(update={"env": measured}),
            "algorithm": _algorithm(run.algorithm, run.constant_tokens),
            "kl_penalty": KlPenaltyConfig(),  # other names of what [algorithm] has
        }
    )


def is_same_run(run: RunConfig, other: RunConfig) -> bool:
    """Whether they differ in nothing, or only in where the run is shown. What one says and the other leaves
    out is no difference where it is the default."""
    shown_alike = other.model_copy(update={name: getattr(run, name) for name in SHOWN})
    return written_out(run) == written_out(shown_alike)


def _filled(config: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of the keys that are left out."""
    return {key: value for key, value in defaults.items() if getattr(config, key) is None}


def _of_the_optimizer(config: LearningConfig) -> dict[str, Any]:
    momentum = MOMENTUM.get(config.optimizer)
    rate = config.learning_rate if config.optimizer == "muon" else None
    return _filled(config, {"momentum": momentum, "adamw_learning_rate": rate})


def _sampling(sampling: SamplingConfig) -> SamplingConfig:
    return sampling.model_copy(update=_filled(sampling, OF_SAMPLING))


def _algorithm(algorithm: AlgorithmConfig, constant_tokens: int | None) -> AlgorithmConfig:
    constant = constant_tokens if algorithm.normalised_by == "constant" else None
    defaults = {
        **OF_LOSSES.get(algorithm.loss, {}),
        "aggregation": algorithm.normalised_by,
        "constant_tokens": constant,
        "entropy_coef_delta": ENTROPY_COEF_DELTA if algorithm.target_entropy is not None else None,
        "max_resample": DEFAULT_RESAMPLE if algorithm.dynamic_sampling else None,
    }
    reference = algorithm.reference
    if reference is not None and reference.sync_steps:
        reference = reference.model_copy(update=_filled(reference, {"mixup_alpha": MIXUP_ALPHA}))
    return algorithm.model_copy(
        update={**_filled(algorithm, defaults), "reference": reference, "preset": None}
    )
