"""How rollouts are sampled: the `[sampling]` table, of a run and of an evaluation."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.inference import (
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)
from quartet.run.values import Count, Fraction, NonNegative, Penalty, PositiveCount, Seed
from quartet.v1.common_pb2 import SamplingParams


def _in_range(temperature: float) -> float:
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"choose 0 for greedy sampling, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    return temperature


#: 0 is greedy.
Temperature = Annotated[NonNegative, pydantic.AfterValidator(_in_range)]


class SamplingKeys(Config):
    """All but the temperature; what is absent is the engine's default."""

    max_tokens: PositiveCount | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Count | None = None
    min_p: Fraction | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, strict=True)] | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_STOP_CHARS)], ...], Field(max_length=MAX_STOPS)
    ] = ()
    seed: Seed | None = None

    @pydantic.field_validator("stop")
    @classmethod
    def _stops_on_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty stop string ends every rollout at once; remove it")
        return stop


class SamplingConfig(SamplingKeys):
    """Of rollouts to learn from."""

    temperature: Annotated[float, Field(allow_inf_nan=False, strict=True)] = 1.0

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

    temperature: Temperature | None = None


def sampling_params(config: SamplingConfig | EvalSamplingConfig, seed: int | None) -> SamplingParams:
    """As it travels. `seed` is the request's own: equal ones draw equal tokens."""
    return SamplingParams(
        max_tokens=config.max_tokens,
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
