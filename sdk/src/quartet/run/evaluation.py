"""What an evaluation is: the `[eval]` table of a run, and the TOML of one that is asked for by itself
(OrchestratorService.Evaluate)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.load import parse_toml, validate
from quartet.config.model import rule
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
from quartet.run.sampling import EvalSamplingConfig, SamplingConfig, Temperature, measured_as, over
from quartet.run.values import Count, Number, PositiveCount

#: More than any environment has.
ALL_EXAMPLES: Final = 1_000_000


def _all(number: Any) -> Any:
    """-1 is how others say it, and `quartet eval`."""
    return ALL_EXAMPLES if type(number) is int and number == -1 else number


_Examples = Annotated[Count, pydantic.BeforeValidator(_all)]
_SomeExamples = Annotated[PositiveCount, pydantic.BeforeValidator(_all)]
#: Two places of one setting.
EVAL_TEMPERATURES: Final = ("eval.temperature", "eval.sampling.temperature")


class EvalEnvConfig(NamedConfig):
    """One environment to evaluate on; what is left out is taken from the table around it."""

    #: As in the table around it.
    num_examples: _SomeExamples | None = None
    #: As in the table around it.
    rollouts_per_example: GroupSize | None = None
    sampling: EvalSamplingConfig | None = None


@dataclass(frozen=True)
class EvalTrial:
    """What an evaluation measures on one environment."""

    name: str
    hosted: HostedConfig
    num_examples: int
    rollouts_per_example: int
    sampling: EvalSamplingConfig


class MeasuredConfig(Config):
    """What every evaluation says of itself."""

    #: How the list of environments is written.
    ENV_TABLE: ClassVar[str]

    #: Of each environment; -1 for all that it has.
    num_examples: _Examples = 64
    #: Rollouts of each example.
    rollouts_per_example: GroupSize = 1
    #: A rollout passes from this reward on.
    pass_threshold: Number = 0.5
    #: An evaluation that is not whole by then counts what it has.
    timeout_seconds: Annotated[
        float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False, strict=True)
    ] = 3600.0
    #: What is left out is the run's.
    sampling: EvalSamplingConfig | None = None
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

    def trials(self, trained_on: Iterable[NamedConfig], trained_as: SamplingConfig) -> list[EvalTrial]:
        """What it measures, where the run trains on these environments, sampled so; empty where there is
        nothing. What an environment to evaluate on says of its own sampling wins."""
        if not self.num_examples:
            return []
        if not self.env:
            size = self.num_examples, self.rollouts_per_example
            return [EvalTrial(env.label, env, *size, self.sampled(env, trained_as)) for env in trained_on]
        return [
            EvalTrial(
                env.label,
                env,
                env.num_examples or self.num_examples,
                env.rollouts_per_example or self.rollouts_per_example,
                over(self._over(measured_as(trained_as)), env.sampling),
            )
            for env in self.env
        ]

    def sampled(self, env: NamedConfig, trained_as: SamplingConfig) -> EvalSamplingConfig:
        """How it samples an environment of training: as that, but for what is said of evaluations."""
        return self._over(over(measured_as(trained_as), env.sampling))

    def _over(self, around: EvalSamplingConfig) -> EvalSamplingConfig:
        return over(around, self.sampling)


class EvalConfig(MeasuredConfig):
    """Evaluations inside a run, each at a pinned version; num_examples = 0 switches them off."""

    ENV_TABLE = "eval.env"

    #: Before the first step.
    before: bool = True
    #: After the last.
    after: bool = True
    #: The same as eval.sampling.temperature.
    temperature: Temperature | None = None
    #: Steps from one evaluation to the next between; 0: none.
    interval: Count = 0

    def is_due(self, step: int, last: int) -> bool:
        """Whether the policy after so many of `last` steps is to be measured."""
        wanted = (
            (step == 0 and self.before)
            or (step == last and self.after)
            or (0 < step < last and self.interval > 0 and step % self.interval == 0)
        )
        return wanted and self.num_examples > 0

    def _over(self, around: EvalSamplingConfig) -> EvalSamplingConfig:
        return over(super()._over(around), EvalSamplingConfig(temperature=self.temperature))


def of_evaluations(config: EvalConfig) -> Iterator[str]:
    """What would measure nothing, and a temperature that is said twice."""
    for key, given in (("interval", config.interval or ""), ("env", "[...]" if config.env else "")):
        if given and not config.num_examples:
            yield (
                f"eval.{key} = {given} has nothing to evaluate; set eval.num_examples above 0, or remove "
                f"eval.{key}"
            )
    own = None if config.sampling is None else config.sampling.temperature
    if config.temperature is not None and own is not None:
        here, there = EVAL_TEMPERATURES
        yield (f"{here} = {config.temperature} and {there} = {own} are one setting; keep one of the two")


class EvaluateConfig(MeasuredConfig):
    """An evaluation that is asked for by itself, of the version that a run has published last."""

    ENV_TABLE = "env"

    #: Of each environment; -1 for all that it has.
    num_examples: _SomeExamples = 64
    #: Its rollouts under way, besides those of the run.
    max_concurrent: PositiveCount = 32

    @rule
    def _fits(self) -> Iterator[str]:
        most = max(self.rollouts_per_example, *(env.rollouts_per_example or 0 for env in self.env), 0)
        if self.max_concurrent < most:
            yield (
                f"max_concurrent = {self.max_concurrent} is less than rollouts_per_example = {most}, which "
                f"run together; set max_concurrent to at least {most}"
            )


def parse_evaluation(toml_text: str) -> EvaluateConfig:
    """Read an evaluation's TOML. Raises ConfigError with one sentence: key, value, remedy."""
    return validate(EvaluateConfig, parse_toml(toml_text, "the evaluation"))
