"""What defines a run's reference model."""

from __future__ import annotations

import pydantic

from quartet_trainer.spec.value import Value


class ReferenceSpec(Value):
    """Which model, and whether it follows the policy."""

    # Empty: the base model.
    model: str = ""
    sync_steps: int = pydantic.Field(default=0, ge=0)
    # None: 1.
    mixup_alpha: float | None = pydantic.Field(default=None, gt=0, le=1)

    @property
    def share(self) -> float:
        """What the policy gets of the reference at a synchronisation."""
        return 1.0 if self.mixup_alpha is None else self.mixup_alpha

    @pydantic.model_validator(mode="after")
    def _follows(self) -> ReferenceSpec:
        if self.model and self.sync_steps:
            raise ValueError("a reference model of its own is frozen; leave out sync_steps, or model")
        if self.mixup_alpha is not None and not self.sync_steps:
            raise ValueError("mixup_alpha is used at synchronisations; set sync_steps, or leave it out")
        return self
