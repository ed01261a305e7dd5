"""What of a run is the trainer's: how the rate goes, what moves the weights, when the state is saved.

1. A key that the chosen schedule or optimizer would not read is refused, never ignored.
2. A schedule that is accepted has the steps that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol

from quartet.config import Config
from quartet.run.values import PositiveCount
from quartet.v1 import trainer_service_pb2 as pb

Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]
Optimizer = Literal["adamw", "muon", "sgd"]

#: As they travel.
SCHEDULES: Final[Mapping[Schedule, pb.Schedule]] = {
    "constant": pb.SCHEDULE_CONSTANT,
    "linear": pb.SCHEDULE_LINEAR,
    "cosine": pb.SCHEDULE_COSINE,
    "warmup_stable_decay": pb.SCHEDULE_WARMUP_STABLE_DECAY,
}

#: What only the trainer reads; a trainer of somebody else's knows it by itself.
OF_THE_TRAINER = (
    "learning_rate",
    "lr_scheduler",
    "warmup_steps",
    "decay_steps",
    "optimizer",
    "momentum",
    "adamw_learning_rate",
    "max_grad_norm",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "freeze_routers",
    "initial_state",
    "microbatch_tokens",
    "compute_dtype",
    "served_dtype",
    "lora",
    "ckpt",
    "checks",
    "trainer",
)


class Learning(Protocol):
    """What every configuration of something that learns has, by the names of a run."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_scheduler(self) -> Schedule: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...


def optimizer_spec(config: Learning, *, warmup_steps: int, total_steps: int) -> pb.OptimizerSpec:
    """As it travels: AdamW over so many optimizer steps, for whoever says nothing else."""
    return pb.OptimizerSpec(
        learning_rate=config.learning_rate,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=SCHEDULES[config.lr_scheduler],
        warmup_steps=warmup_steps,
        total_steps=total_steps,
    )


class CheckpointConfig(Config):
    """When the trainer saves its state, and how many states it keeps."""

    interval: PositiveCount = 10
    keep_last: PositiveCount = 2


def check_schedule(scheduler: Schedule, max_steps: int, warmup_steps: int, decay_steps: int) -> None:
    """Refuse a schedule that has no room, or steps that it would not read. Errors: ValueError."""
    if scheduler in ("linear", "cosine") and warmup_steps >= max_steps:
        raise ValueError(
            f'lr_scheduler = "{scheduler}" needs steps after the warm-up, and max_steps = '
            f"{max_steps} leaves none after warmup_steps = {warmup_steps}; raise max_steps, or "
            'set lr_scheduler = "constant"'
        )
    if scheduler != "warmup_stable_decay":
        if decay_steps:
            raise ValueError(
                f'decay_steps = {decay_steps} belongs to lr_scheduler = "warmup_stable_decay"; choose it, or '
                "remove decay_steps"
            )
    elif not 0 < decay_steps <= max_steps - warmup_steps:
        raise ValueError(
            f'lr_scheduler = "warmup_stable_decay" needs decay_steps from 1 to {max_steps - warmup_steps}, '
            f"the steps after the warm-up, not {decay_steps}"
        )


def check_optimizer(
    optimizer: Optimizer, momentum: float | None, learning_rate: float, adamw_learning_rate: float | None
) -> None:
    """Refuse what the optimizer would not read. Errors: ValueError."""
    if momentum is not None and optimizer == "adamw":
        raise ValueError('momentum belongs to optimizer = "sgd" or "muon"; remove it, or set adam_beta1')
    if adamw_learning_rate is not None:
        if optimizer != "muon":
            raise ValueError('adamw_learning_rate belongs to optimizer = "muon"; remove it')
        if learning_rate == 0:
            raise ValueError("adamw_learning_rate keeps its proportion to learning_rate, which is 0")
