"""What is evaluated: the TOML of `quartet eval @ file.toml`.

1. Top-level keys hold for every `[[eval]]`; a key inside one wins there. An `[[ablation]]` is several of them
   (ablation.py).
2. One of three answers: our inference on a model folder (`model` alone), replicas that run already
   (`inference_addresses`), or an OpenAI-compatible endpoint (`base_url`, or a `model` that is an id in the
   file of `endpoints`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from quartet.cli.eval.ablation import combinations
from quartet.cli.eval.other_flags import OF_AN_EVAL_FILE
from quartet.config import Config, ConfigError
from quartet.config.load import validate
from quartet.run.hosted import MAX_ENVIRONMENTS, GroupSize, HostedConfig, as_array
from quartet.run.sampling import EvalSamplingConfig, over
from quartet.run.values import Number, PositiveCount, Table, Text

#: What Verifiers' own command takes where nothing is said.
NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE, MAX_CONCURRENT = 5, 3, 32
PASS_THRESHOLD = 0.5
#: num_examples that means all of them.
ALL = -1


def _evaluates_something(num_examples: int) -> int:
    if num_examples == 0:
        raise ValueError(f"nothing would be evaluated; set it above 0, or to {ALL} for all")
    return num_examples


Examples = Annotated[int, Field(ge=ALL, lt=2**32, strict=True), pydantic.AfterValidator(_evaluates_something)]
Split = Literal["eval", "train"]


class OneEvalConfig(HostedConfig):
    """One environment; what is left out is taken from the top of the file."""

    #: Of its folder and its row; two evaluations of one environment need two.
    name: Text | None = None
    split: Split | None = None
    num_examples: Examples | None = None
    rollouts_per_example: GroupSize | None = None
    pass_threshold: Number | None = None
    sampling: EvalSamplingConfig = EvalSamplingConfig()


class AblationConfig(OneEvalConfig):
    """One environment, evaluated with every combination of some values."""

    sweep: Table

    @property
    def evals(self) -> tuple[OneEvalConfig, ...]:
        """One for each combination."""
        fixed = self.model_dump(exclude_unset=True, exclude={"sweep"})
        tables = combinations(fixed, self.sweep, EvalSamplingConfig.model_fields)
        return tuple(validate(OneEvalConfig, table) for table in tables)

    @pydantic.model_validator(mode="after")
    def _combine(self) -> Self:
        try:
            assert self.evals
        except ConfigError as error:
            raise ValueError(f"in its sweep: {error}") from None
        return self


class AnswererConfig(Config):
    """Who answers, how it is sampled, and the services of this machine behind it."""

    model: str = ""
    inference_addresses: tuple[Text, ...] = ()
    base_url: str = ""
    #: Name of the environment variable that holds the endpoint's key.
    api_key_var: str = "OPENAI_API_KEY"
    endpoints: Path = Path("configs/endpoints.toml")
    max_concurrent: PositiveCount = MAX_CONCURRENT
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    inference: Table
    envhost: Table

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Either of the two says who answers."""
        either = {"base_url": ("inference_addresses",), "inference_addresses": ("base_url",)}
        return either.get(key, ())

    @pydantic.model_validator(mode="after")
    def _one_answers(self) -> Self:
        if self.base_url and self.inference_addresses:
            raise ValueError("base_url and inference_addresses both say who answers; give one of the two")
        if self.base_url and not self.model:
            raise ValueError('base_url needs the name of a model there; set model = "..."')
        return self


class EvalFileConfig(AnswererConfig):
    """A file of evaluations."""

    OTHER_NAMES: ClassVar = OF_AN_EVAL_FILE

    num_examples: Examples = NUM_EXAMPLES
    rollouts_per_example: GroupSize = ROLLOUTS_PER_EXAMPLE
    split: Split = "eval"
    #: A rollout passes from this reward on.
    pass_threshold: Number = PASS_THRESHOLD
    eval: Annotated[tuple[OneEvalConfig, ...], Field(max_length=MAX_ENVIRONMENTS)] = ()
    ablation: Annotated[tuple[AblationConfig, ...], Field(max_length=MAX_ENVIRONMENTS)] = ()

    @pydantic.field_validator("eval", "ablation", mode="before")
    @classmethod
    def _is_an_array(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return as_array(value, str(info.field_name))

    @pydantic.model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [one.name or one.id for one in self.evals]
        if len(names) > MAX_ENVIRONMENTS:
            raise ValueError(f"there are {len(names)} evaluations; at most {MAX_ENVIRONMENTS} go in a file")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f'two evaluations are called {twice!r}; give each a name = "..." of its own')
        return self

    @property
    def evals(self) -> tuple[OneEvalConfig, ...]:
        """Those of [[eval]], then those of each [[ablation]]."""
        return self.eval + tuple(one for ablation in self.ablation for one in ablation.evals)

    @property
    def rollout_seconds(self) -> list[float]:
        """Of each: how long a rollout of it may take."""
        return [one.timeout_seconds for one in self.evals]

    @property
    def trials(self) -> list[Trial]:
        """One for each evaluation, its settings complete."""
        return [self._trial(one) for one in self.evals]

    def _trial(self, one: OneEvalConfig) -> Trial:
        return Trial(
            name=one.name or one.id,
            hosted=HostedConfig(
                id=one.id, args=one.args, timeout_seconds=one.timeout_seconds, max_retries=one.max_retries
            ),
            split=one.split or self.split,
            num_examples=self.num_examples if one.num_examples is None else one.num_examples,
            rollouts_per_example=one.rollouts_per_example or self.rollouts_per_example,
            pass_threshold=self.pass_threshold if one.pass_threshold is None else one.pass_threshold,
            sampling=over(self.sampling, one.sampling),
            max_concurrent=self.max_concurrent,
        )


@dataclass(frozen=True)
class Trial:
    """One environment and how it is played."""

    name: str
    hosted: HostedConfig
    split: str
    num_examples: int
    rollouts_per_example: int
    sampling: EvalSamplingConfig
    max_concurrent: int
    pass_threshold: float = PASS_THRESHOLD
