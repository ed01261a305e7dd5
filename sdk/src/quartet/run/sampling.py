"""How rollouts are sampled: the `[sampling]` table, of a run, of one of its environments, of an evaluation.

What one of these tables leaves out is as the table around it says (`over`). The temperature of training is
one for all environments of a run: the loss of a batch reads one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.inference import (
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)
from quartet.run.values import Count, Fraction, JsonTable, NonNegative, Penalty, PositiveCount, Seed
from quartet.template_settings import MAX_SETTINGS_BYTES, written
from quartet.v1.common_pb2 import SamplingParams


def _in_range(temperature: float) -> float:
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"choose 0 for greedy sampling, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    return temperature


#: 0 is greedy.
Temperature = Annotated[NonNegative, pydantic.AfterValidator(_in_range)]
Stops = Annotated[tuple[Annotated[str, Field(max_length=MAX_STOP_CHARS)], ...], Field(max_length=MAX_STOPS)]

#: Of template_settings, as JSON: three tables at most are laid over each other, and travel as one.
MAX_TABLE_BYTES: Final = MAX_SETTINGS_BYTES // 3

#: Keys of penalties, with the value of each that is none.
PENALTIES: Final = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class SamplingKeys(Config):
    """All but the temperature; what is absent is the engine's default."""

    #: Of one answer, which ends with the context at the latest.
    max_tokens: PositiveCount | None = None
    #: So many tokens an answer has before it may end, but where the context does; 0: it ends when it likes.
    min_tokens: Count | None = None
    #: Only the likeliest tokens that together have this probability are drawn; 1: all.
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    #: Only so many of the likeliest; 0: all.
    top_k: Count | None = None
    #: Only tokens that have this share of the likeliest one's probability; 0: all.
    min_p: Fraction | None = None
    #: Tokens of prompt and answer get less likely; 1: off.
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, strict=True)] | None
    ) = None
    #: Tokens that the answer has get less likely; 0: off.
    presence_penalty: Penalty | None = None
    #: The same, with each time more; 0: off.
    frequency_penalty: Penalty | None = None
    #: Empty: none, also where the table around it has some.
    stop: Stops | None = None
    #: Of the draws of every request; absent: tokens are drawn afresh each time, whatever the run's seed.
    seed: Seed | None = None
    #: Variables of the chat template, over those that the inference service has of its own.
    template_settings: JsonTable | None = None

    @rule
    def _has_room(self) -> Iterator[str]:
        yield from of_room(self)

    @pydantic.field_validator("stop")
    @classmethod
    def _stops_on_text(cls, stop: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if stop is not None and "" in stop:
            raise ValueError("an empty stop string ends every rollout at once; remove it")
        return stop

    @pydantic.field_validator("template_settings")
    @classmethod
    def _can_be_chosen(cls, settings: dict[str, Any] | None) -> dict[str, Any] | None:
        size = len(written(settings or {}).encode())
        if size > MAX_TABLE_BYTES:
            raise ValueError(
                f"it has {size} bytes as JSON; a table has {MAX_TABLE_BYTES} at most: shorten it"
            )
        return settings


class SamplingConfig(SamplingKeys):
    """Of rollouts to learn from."""

    #: The lower, the more often the likeliest token is drawn.
    temperature: Annotated[float, Field(allow_inf_nan=False, strict=True)] = 1.0
    stop: Stops = ()

    @pydantic.field_validator("temperature")
    @classmethod
    def _samples(cls, temperature: float) -> float:
        if temperature <= 0:
            raise ValueError(
                "a greedy group has no spread to learn from; set it above 0 (eval.temperature may be 0)"
            )
        if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"choose {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
        return temperature


class EvalSamplingConfig(SamplingKeys):
    """Of rollouts to measure with: greedy ones too."""

    #: 0: greedy.
    temperature: Temperature | None = None


SamplingT = TypeVar("SamplingT", bound=SamplingKeys)


def over(around: SamplingT, own: SamplingKeys | None) -> SamplingT:
    """As the table around it says, but for what is said in one of its own; template_settings key by key."""
    if own is None:
        return around
    said = own.model_dump(exclude_none=True)
    if own.template_settings is not None:
        said["template_settings"] = {**(around.template_settings or {}), **own.template_settings}
    return around.model_copy(update=said)


def of_room(sampling: SamplingKeys, where: str = "") -> Iterator[str]:
    """What of an answer's lengths is at odds; `where`, if in several tables."""
    least, most = sampling.min_tokens, sampling.max_tokens
    if least is not None and most is not None and least > most:
        yield (
            f"{where}min_tokens = {least} is more than max_tokens = {most}, where an answer ends; "
            f"set min_tokens to at most {most}, or raise max_tokens"
        )


def measured_as(trained: SamplingConfig) -> EvalSamplingConfig:
    """How rollouts are measured that are sampled as those to learn from."""
    # Checked as they were read: what was laid over each other may have more than one table.
    return EvalSamplingConfig.model_construct(**dict(trained))


def penalties(name: str, table: SamplingKeys | None) -> list[str]:
    """Those that a table of that name asks for, as "name.key = value"."""
    values = {} if table is None else {key: getattr(table, key) for key in PENALTIES}
    return [f"{name}.{key} = {value}" for key, value in values.items() if value not in (None, PENALTIES[key])]


def sampling_params(config: SamplingConfig | EvalSamplingConfig, seed: int | None) -> SamplingParams:
    """As it travels. `seed` is the request's own: equal ones draw equal tokens."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        min_tokens=config.min_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        stop=config.stop,
        seed=seed,
    )
