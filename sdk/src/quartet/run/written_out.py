"""A run with its defaults written out: what it is computed with, whether somebody said so or not.

1. Two runs have one such form where one says what the other leaves out, and only there.
2. A preset is its values, so its name decides nothing. One that another release makes otherwise is another
   value here, and told as such.
3. What a default is that only the machine knows (compute_dtype) stays left out.
4. A table that is off says nothing.
5. A table [sampling] inside another one has only what it says otherwise than the tables around it.
"""

from __future__ import annotations

from typing import Any, Final

from quartet.run.algorithm import AlgorithmConfig
from quartet.run.algorithm_tables import KernelConfig, ReferenceConfig
from quartet.run.batch import MIN_AT_ONCE
from quartet.run.config import SHOWN, RunConfig
from quartet.run.credit import DEFAULT_RESAMPLE
from quartet.run.difficulty import DifficultyFilterConfig
from quartet.run.evaluation import EvalConfig
from quartet.run.kl_penalty import KlPenaltyConfig
from quartet.run.learning import LearningConfig
from quartet.run.lora import LoraConfig
from quartet.run.sampling import (
    PENALTIES,
    EvalSamplingConfig,
    SamplingConfig,
    SamplingKeys,
    SamplingT,
    measured_as,
    over,
)

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
    sampling = _sampling(run.sampling)
    trained = tuple(
        env.model_copy(update={"name": env.label, "sampling": _apart(env.sampling, sampling)})
        for env in run.env
    )
    return run.model_copy(
        update={
            # Above that the places of the hosts decide where it is left out.
            "max_concurrent": run.at_once if run.at_once <= MIN_AT_ONCE else run.max_concurrent,
            "on_environment_change": run.on_environment_change or "warn",
            "served_dtype": run.served_dtype or run.compute_dtype,
            **_of_the_optimizer(run),
            "sampling": sampling,
            "env": trained,
            "eval": _evaluations(run.eval, measured_as(sampling), any(env.sampling for env in trained)),
            "algorithm": _algorithm(run.algorithm, run.constant_tokens),
            "kl_penalty": KlPenaltyConfig(),  # other names of what [algorithm] has
            "lora": run.lora if run.lora.enabled else LoraConfig(),
            "difficulty_filter": (
                run.difficulty_filter if run.difficulty_filter.enabled else DifficultyFilterConfig()
            ),
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
    settings = sampling.template_settings or None
    return sampling.model_copy(update={**_filled(sampling, OF_SAMPLING), "template_settings": settings})


def _evaluations(config: EvalConfig, trained: EvalSamplingConfig, varies: bool) -> EvalConfig:
    """`trained`: how rollouts to learn from are sampled; `varies`: by their environments."""
    own = over(config.sampling or EvalSamplingConfig(), EvalSamplingConfig(temperature=config.temperature))
    around = over(trained, own)
    measured = tuple(
        env.model_copy(
            update={
                "name": env.label,
                "num_examples": env.num_examples or config.num_examples,
                "rollouts_per_example": env.rollouts_per_example or config.rollouts_per_example,
                "sampling": _apart(env.sampling, around),
            }
        )
        for env in config.env
    )
    # Where it measures the environments of training, it wins over what one of those says of itself.
    apart = own if varies and not config.env else _apart(own, trained)
    return config.model_copy(update={"temperature": None, "sampling": apart, "env": measured})


def _apart(own: SamplingT | None, around: SamplingKeys) -> SamplingT | None:
    """What of `own` is said otherwise around it; None if nothing is."""
    if own is None:
        return None
    settings, there = own.template_settings or {}, around.template_settings or {}
    update: dict[str, Any] = {key: None for key, value in own if value == getattr(around, key)}
    if own.template_settings is not None:
        others = {key: value for key, value in settings.items() if key not in there or there[key] != value}
        update["template_settings"] = others or None
    apart = own.model_copy(update=update)
    return apart if any(value is not None for _, value in apart) else None


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
    if reference == ReferenceConfig():
        reference = None  # the base model either way
    if reference is not None and reference.sync_steps:
        reference = reference.model_copy(update=_filled(reference, {"mixup_alpha": MIXUP_ALPHA}))
    return algorithm.model_copy(
        update={**_filled(algorithm, defaults), "reference": reference, "preset": None}
    )
