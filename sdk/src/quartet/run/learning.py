"""What of a run or a fine-tuning is the trainer's: how the rate goes, what moves the weights, when the state
is saved.

1. A key that the chosen schedule or optimizer would not read is refused, never ignored; but for AdamW's
   betas, which files of others give beside any optimizer.
2. A schedule that is accepted has the steps that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import pydantic

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.values import Count, Decay, NonNegative, Positive, PositiveCount
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

OPTIMIZERS: Final[Mapping[Optimizer, pb.OptimizerKind]] = {
    "adamw": pb.OPTIMIZER_KIND_ADAMW,
    "muon": pb.OPTIMIZER_KIND_MUON,
    "sgd": pb.OPTIMIZER_KIND_SGD,
}
#: Of the optimizer: the contract counts them in 32 bits.
MAX_STEPS: Final = 2**32 - 1
#: torch's default, and everybody's.
ADAM_EPSILON: Final = 1e-8

#: What only the trainer reads; a trainer of somebody else's knows it by itself.
OF_THE_TRAINER = (
    "learning_rate",
    "lr_scheduler",
    "warmup_steps",
    "decay_steps",
    "min_lr",
    "optimizer",
    "momentum",
    "adamw_learning_rate",
    "max_grad_norm",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "freeze_routers",
    "initial_state",
    "initial_optimizer",
    "microbatch_tokens",
    "compute_dtype",
    "served_dtype",
    "lora",
    "ckpt",
    "checks",
    "trainer",
)


class LearningConfig(Config):
    """How what learns moves: the keys that a run and a fine-tuning share."""

    #: The peak of the learning rate.
    learning_rate: NonNegative = 1e-6
    #: How the rate goes over the steps.
    lr_scheduler: Schedule = "constant"
    #: Steps over which the rate rises.
    warmup_steps: Count = 0
    #: The last steps of warmup_stable_decay, in which the rate falls.
    decay_steps: Count = 0
    #: Where a rate that falls ends; below learning_rate.
    min_lr: NonNegative = 0.0
    #: What moves the weights.
    optimizer: Optimizer = "adamw"
    #: Of muon and sgd; default 0.95 and 0.9.
    momentum: Decay | None = None
    #: Of what adamw moves where optimizer = "muon"; default learning_rate.
    adamw_learning_rate: NonNegative | None = None
    #: Gradients are scaled down to this norm; 0: never.
    max_grad_norm: NonNegative = 1.0
    #: Of matrices.
    weight_decay: NonNegative = 0.0
    #: Of AdamW: what its mean of the gradients keeps in each step.
    adam_beta1: Decay = 0.9
    #: Of AdamW: what its mean of their squares keeps.
    adam_beta2: Decay = 0.999
    #: Of AdamW: what is added to the root of that mean.
    adam_epsilon: Positive = ADAM_EPSILON
    #: Tokens of a micro-batch; a batch's gradients add up over as many as it takes. 0: the trainer's own
    #: setting.
    microbatch_tokens: Count = 0

    @pydantic.field_validator("adamw_learning_rate")
    @classmethod
    def _moves_all(cls, rate: float | None) -> float | None:
        if rate == 0:
            raise ValueError(
                "vectors, embeddings and head, which AdamW moves, would stay as they are; set it above 0, or "
                "leave it out: then it is learning_rate"
            )
        return rate


def optimizer_spec(
    config: LearningConfig, total_steps: int, *, earlier_ends: Sequence[int] = (), versions_per_step: int = 1
) -> pb.OptimizerSpec:
    """As it travels, over so many steps, each of so many optimizer steps. Before it was extended it ended at
    `earlier_ends`."""
    return pb.OptimizerSpec(
        kind=OPTIMIZERS[config.optimizer],
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        adamw_learning_rate=config.adamw_learning_rate,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=SCHEDULES[config.lr_scheduler],
        min_lr=config.min_lr,
        warmup_steps=config.warmup_steps * versions_per_step,
        decay_steps=config.decay_steps * versions_per_step,
        total_steps=total_steps * versions_per_step,
        earlier_total_steps=[end * versions_per_step for end in earlier_ends],
    )


class CheckpointConfig(Config):
    """When the trainer saves its state, and which states it keeps."""

    #: Steps from one saved state to the next.
    interval: PositiveCount = 10
    #: So many of the newest.
    keep_last: PositiveCount = 2
    #: And those after every so many steps, for good.
    keep_interval: PositiveCount | None = None

    @rule
    def _keeps_what_is_saved(self) -> None:
        if self.keep_interval is not None and self.keep_interval % self.interval:
            below = self.keep_interval // self.interval * self.interval
            nearest = " or ".join(str(one) for one in (below, below + self.interval) if one)
            raise ValueError(
                f"states are saved after every {self.interval} steps (interval), and keep_interval = "
                f"{self.keep_interval} is no multiple of that; set it to {nearest}, or interval to a divisor "
                "of it"
            )

    def keeps(self, steps: int) -> bool:
        """Whether the state after so many steps stays for good."""
        return self.keep_interval is not None and steps % self.keep_interval == 0

    def most_states(self, steps: int) -> int:
        """As many there may be at once in a run of so many steps. Besides those of the interval it saves one
        at its end, and where it is closed."""
        kept = steps // self.keep_interval if self.keep_interval else 0
        return kept + min(self.keep_last, steps // self.interval + 2)


def of_the_schedule(config: LearningConfig, total_steps: int | None) -> Iterator[str]:
    """What is wrong with a schedule: it has no room, or would not read a key. `total_steps`: None where that
    is not known yet."""
    if total_steps is not None:
        yield from _of_the_room(config, total_steps)
    if config.lr_scheduler != "warmup_stable_decay":
        if config.decay_steps:
            yield (
                f'decay_steps = {config.decay_steps} belongs to lr_scheduler = "warmup_stable_decay"; choose '
                "it, or remove decay_steps"
            )
    elif not config.decay_steps and total_steps is None:
        yield 'lr_scheduler = "warmup_stable_decay" needs decay_steps, from 1 on, not 0'
    if config.min_lr and config.lr_scheduler == "constant":
        yield (
            f'min_lr = {config.min_lr:g} is where a rate ends that falls, and lr_scheduler = "constant" does '
            "not; choose another, or remove min_lr"
        )
    if config.min_lr and config.min_lr >= config.learning_rate:
        yield (
            f"min_lr = {config.min_lr:g} is not below learning_rate = {config.learning_rate:g}, from which "
            "the rate falls; set it to less"
        )


def _of_the_room(config: LearningConfig, total_steps: int) -> Iterator[str]:
    scheduler, warmup_steps = config.lr_scheduler, config.warmup_steps
    if scheduler in ("linear", "cosine") and warmup_steps >= total_steps:
        yield (
            f'lr_scheduler = "{scheduler}" needs steps after the warm-up, and max_steps = '
            f"{total_steps} leaves none after warmup_steps = {warmup_steps}; raise max_steps, or "
            'set lr_scheduler = "constant"'
        )
    if scheduler == "warmup_stable_decay" and not 0 < config.decay_steps <= total_steps - warmup_steps:
        yield (
            f'lr_scheduler = "warmup_stable_decay" needs decay_steps from 1 to {total_steps - warmup_steps}, '
            f"the steps after the warm-up, not {config.decay_steps}"
        )


def of_the_optimizer(config: LearningConfig) -> Iterator[str]:
    """What the optimizer would not read."""
    if config.momentum is not None and config.optimizer == "adamw":
        yield 'momentum belongs to optimizer = "sgd" or "muon"; remove it, or set adam_beta1'
    if config.adam_epsilon != ADAM_EPSILON and config.optimizer == "sgd":
        yield (f'adam_epsilon = {config.adam_epsilon:g} belongs to optimizer = "adamw" or "muon"; remove it')
    if config.adamw_learning_rate is not None:
        if config.optimizer != "muon":
            yield 'adamw_learning_rate belongs to optimizer = "muon"; remove it'
        if config.learning_rate == 0:
            yield (
                f"adamw_learning_rate = {config.adamw_learning_rate:g} keeps its proportion to "
                "learning_rate, which is 0; set that above 0, or remove it"
            )
