"""The tables in [algorithm]: of a reference, of weights, of a penalty."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.run.values import Count, NonNegative, Positive, PositiveCount, Text


class ReferenceConfig(Config):
    """A second model: what the policy must not leave too far behind, or the teacher that it learns from."""

    #: A model folder or hub id, held by the trainer; absent: the run's own base model.
    model: Text | None = None
    #: host:port of an inference service that serves it; then the trainer holds none.
    address: Text | None = None
    #: Optimizer steps between synchronisations with the policy; 0: frozen.
    sync_steps: Count = 0
    #: What the policy gets of it at a synchronisation.
    mixup_alpha: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None

    @pydantic.model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.model is not None and self.address is not None:
            raise ValueError("model is held by the trainer, address is served elsewhere; give one of the two")
        elsewhere = self.model is not None or self.address is not None
        if self.sync_steps and elsewhere:
            raise ValueError("another model does not follow the policy; leave out sync_steps")
        if self.mixup_alpha is not None and not self.sync_steps:
            raise ValueError("mixup_alpha is used at synchronisations; set sync_steps above 0, or remove it")
        return self


class CorrectionConfig(Config):
    """Weights for what lies between the sampler and the proximal policy."""

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence"] = "token"
    cap: Positive = 2.0
    floor: NonNegative = 0.0

    @pydantic.model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.floor and self.mode == "truncate":
            raise ValueError('floor belongs to mode = "mask"; remove it')
        if self.floor >= self.cap:
            raise ValueError(f"floor = {self.floor} leaves nothing below cap = {self.cap}; lower it")
        return self


class KernelConfig(Config):
    """loss = "vespo": a sample of ratio W weighs W^k * exp(lambda * (1 - W)), by its advantage's sign."""

    k_positive: Positive = 2.0
    lambda_positive: Positive = 3.0
    k_negative: Positive = 3.0
    lambda_negative: Positive = 2.0


class OverlongPenaltyConfig(Config):
    """What long rollouts lose of their rewards: nothing up to `from_tokens`, `factor` from `to_tokens` on,
    between them in proportion (DAPO, arXiv 2503.14476, section 3.4)."""

    #: So many sampled tokens of a rollout cost nothing.
    from_tokens: Count
    #: So many, and more, cost all of it.
    to_tokens: PositiveCount
    #: What is taken from the reward then.
    factor: Positive = 1.0

    @pydantic.model_validator(mode="after")
    def _rises(self) -> Self:
        if self.to_tokens <= self.from_tokens:
            raise ValueError(
                f"to_tokens = {self.to_tokens} is not above from_tokens = {self.from_tokens}; set it to the "
                "length from which the whole penalty is due"
            )
        return self
