"""What of a run or a fine-tuning is the trainer's: how the rate goes, what moves the weights, when the state
is saved.

1. A key that the chosen schedule or optimizer would not read is refused, never ignored; but for AdamW's
   betas, which files of others give beside any optimizer.
2. A schedule that is accepted has the steps that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from quartet.config import Config
from quartet.config.model import rule
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

OPTIMIZERS: Final[Mapping[Optimizer, pb.OptimizerKind]] = {
    "adamw": pb.OPTIMIZER_KIND_ADAMW,
    "muon": pb.OPTIMIZER_KIND_MUON,
    "sgd": pb.OPTIMIZER_KIND_SGD,
}
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
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def momentum(self) -> float | None: ...
    @property
    def adamw_learning_rate(self) -> float | None: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def adam_epsilon(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...


def optimizer_spec(
    config: Learning, total_steps: int, *, earlier_ends: Sequence[int] = (), versions_per_step: int = 1
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


def check_schedule(config: Learning, total_steps: int | None) -> None:
    """Refuse a schedule that has no room, or keys that it would not read. `total_steps`: None where it is not
    known yet. Errors: ValueError."""
    if total_steps is not None:
        _check_room(config, total_steps)
    if config.lr_scheduler != "warmup_stable_decay":
        if config.decay_steps:
            raise ValueError(
                f'decay_steps = {config.decay_steps} belongs to lr_scheduler = "warmup_stable_decay"; choose '
                "it, or remove decay_steps"
            )
    elif not config.decay_steps:
        raise ValueError('lr_scheduler = "warmup_stable_decay" needs decay_steps, from 1 on, not 0')
    if config.min_lr and config.lr_scheduler == "constant":
        raise ValueError(
            f'min_lr = {config.min_lr:g} is where a rate ends that falls, and lr_scheduler = "constant" does '
            "not; choose another, or remove min_lr"
        )
    if config.min_lr and config.min_lr >= config.learning_rate:
        raise ValueError(
            f"min_lr = {config.min_lr:g} is not below learning_rate = {config.learning_rate:g}, from which "
            "the rate falls; set it to less"
        )


def _check_room(config: Learning, total_steps: int) -> None:
    scheduler, warmup_steps = config.lr_scheduler, config.warmup_steps
    if scheduler in ("linear", "cosine") and warmup_steps >= total_steps:
        raise ValueError(
            f'lr_scheduler = "{scheduler}" needs steps after the warm-up, and max_steps = '
            f"{total_steps} leaves none after warmup_steps = {warmup_steps}; raise max_steps, or "
            'set lr_scheduler = "constant"'
        )
    if scheduler == "warmup_stable_decay" and not 0 < config.decay_steps <= total_steps - warmup_steps:
        raise ValueError(
            f'lr_scheduler = "warmup_stable_decay" needs decay_steps from 1 to {total_steps - warmup_steps}, '
            f"the steps after the warm-up, not {config.decay_steps}"
        )


def check_optimizer(config: Learning) -> None:
    """Refuse what the optimizer would not read. Errors: ValueError."""
    if config.momentum is not None and config.optimizer == "adamw":
        raise ValueError('momentum belongs to optimizer = "sgd" or "muon"; remove it, or set adam_beta1')
    if config.adam_epsilon != ADAM_EPSILON and config.optimizer == "sgd":
        raise ValueError(
            f'adam_epsilon = {config.adam_epsilon:g} belongs to optimizer = "adamw" or "muon"; remove it'
        )
    if config.adamw_learning_rate is not None:
        if config.optimizer != "muon":
            raise ValueError('adamw_learning_rate belongs to optimizer = "muon"; remove it')
        if config.learning_rate == 0:
            raise ValueError("adamw_learning_rate keeps its proportion to learning_rate, which is 0")
