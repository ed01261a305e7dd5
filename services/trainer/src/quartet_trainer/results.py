"""What a run tells of itself, of a batch and of a step."""

from __future__ import annotations

from dataclasses import dataclass

from quartet_trainer.verification import Verification


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it stands, apart from its place in the sequence."""

    policy_version: int
    skipped_steps: int
    trainable_parameters: int
    parameters: int
    published_version: int | None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch did."""

    loss: float
    loss_tokens: int
    tokens: int
    diagnostics: dict[str, float]
    verification: Verification | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    grad_norm: float
    learning_rate: float
    policy_version: int
    skipped_nonfinite: bool
