"""What an evaluation is: the `[eval]` table of a run, and the TOML of one that is asked for by itself
(OrchestratorService.Evaluate)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.load import parse_toml, validate
from quartet.run.hosted import (
    MAX_ENVIRONMENTS,
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    GroupSize,
    HostedConfig,
    NamedConfig,
    as_array,
    distinct,
)
from quartet.run.sampling import EvalSamplingConfig, Temperature
from quartet.run.values import Count, Number, PositiveCount


class EvalEnvConfig(NamedConfig):
    """One environment to evaluate on; what is left out is taken from the table around it."""

    num_examples: PositiveCount | None = None
    rollouts_per_example: GroupSize | None = None


@dataclass(frozen=True)
class EvalTrial:
    """What an evaluation measures on one environment."""

    name: str
    hosted: HostedConfig
    num_examples: int
    rollouts_per_example: int


class MeasuredConfig(Config):
    """What every evaluation says of itself."""

    #: How the list of environments is written.
    ENV_TABLE: ClassVar[str]

    num_examples: Count = 64
    rollouts_per_example: GroupSize = 1
    #: A rollout passes from this reward on.
    pass_threshold: Number = 0.5
    #: An evaluation that is not whole by then counts what it has.
    timeout_seconds: Annotated[
        float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False, strict=True)
    ] = 3600.0
    #: Where to evaluate, if not where the run trains.
    env: Annotated[tuple[EvalEnvConfig, ...], Field(max_length=MAX_ENVIRONMENTS)] = ()

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _is_an_array(cls, env: Any) -> Any:
        return as_array(env, cls.ENV_TABLE)

    @pydantic.field_validator("env")
    @classmethod
    def _distinct(cls, env: tuple[EvalEnvConfig, ...]) -> tuple[EvalEnvConfig, ...]:
        return distinct(env)

    def trials(self, trained_on: Iterable[NamedConfig]) -> list[EvalTrial]:
        """What it measures, where the run trains on these environments; empty where there is nothing."""
        if not self.num_examples:
            return []
        if not self.env:
            size = self.num_examples, self.rollouts_per_example
            return [EvalTrial(env.label, env, *size) for env in trained_on]
        return [
            EvalTrial(
                env.label,
                env,
                env.num_examples or self.num_examples,
                env.rollouts_per_example or self.rollouts_per_example,
            )
            for env in self.env
        ]


class EvalConfig(MeasuredConfig):
    """Evaluations inside a run, each at a pinned version; num_examples = 0 switches them off."""

    ENV_TABLE = "eval.env"

    before: bool = True
    after: bool = True
    temperature: Temperature | None = None
    interval: Count = 0


class EvaluateConfig(MeasuredConfig):
    """An evaluation that is asked for by itself, of the version that a run has published last."""

    ENV_TABLE = "env"

    num_examples: PositiveCount = 64
    #: Its rollouts under way, besides those of the run.
    max_concurrent: PositiveCount = 32
    #: What is left out is the run's.
    sampling: EvalSamplingConfig = EvalSamplingConfig()

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        for trial in self.trials([]):
            self._check_fits(trial.rollouts_per_example)
        self._check_fits(self.rollouts_per_example)
        return self

    def _check_fits(self, rollouts_per_example: int) -> None:
        if self.max_concurrent < rollouts_per_example:
            raise ValueError(
                f"max_concurrent = {self.max_concurrent} is less than rollouts_per_example = "
                f"{rollouts_per_example}, which run together; set max_concurrent to at least "
                f"{rollouts_per_example}"
            )


def parse_evaluation(toml_text: str) -> EvaluateConfig:
    """Read an evaluation's TOML. Raises ConfigError with one sentence: key, value, remedy."""
    return validate(EvaluateConfig, parse_toml(toml_text, "the evaluation"))
