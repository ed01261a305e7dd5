"""The learning rate and the optimizer of a script's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quartet.config.model import ConfigError
from quartet.scripts.draft import Draft

#: lr_scheduler_type to lr_scheduler.
SCHEDULERS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


def scheduler_of(draft: Draft) -> str:
    """Puts the schedule into the draft; by the name that the arguments have for it. Raises ConfigError."""
    kind = draft.chosen("lr_scheduler_type", tuple(SCHEDULERS))
    draft.put("lr_scheduler", SCHEDULERS[kind], "lr_scheduler_type")
    return kind


def settings_of(draft: Draft, batches: Callable[[int, str], int], kind: str) -> None:
    """Puts those of the schedule itself into the draft; `batches`: how many so many steps are. Raises
    ConfigError."""
    settings = dict(draft.args.lr_scheduler_kwargs or {})
    match kind:
        case "warmup_stable_decay":
            decay = settings.get("num_decay_steps")
            if settings != {"num_decay_steps": decay, "decay_type": "linear"} or type(decay) is not int:
                instead = 'falls linearly here; give {"num_decay_steps": N, "decay_type": "linear"}'
                raise _refused(settings, f"{kind} {instead}")
            draft.put("decay_steps", batches(decay, "lr_scheduler_kwargs"), "lr_scheduler_kwargs")
        case "cosine_with_min_lr":
            name, least = next(iter(settings.items()), ("", None))
            is_one = len(settings) == 1 and name in ("min_lr", "min_lr_rate")
            if not is_one or not isinstance(least, int | float) or isinstance(least, bool):
                raise _refused(settings, f'{kind} takes {{"min_lr": RATE}} or {{"min_lr_rate": SHARE}}')
            share = draft.args.learning_rate if name == "min_lr_rate" else 1.0
            draft.put("min_lr", float(least) * share, "lr_scheduler_kwargs")
        case _ if settings:
            raise _refused(settings, f"{kind} takes none; leave it out")


def _refused(settings: Mapping[str, Any], why: str) -> ConfigError:
    return ConfigError(f"args.lr_scheduler_kwargs = {settings!r} is refused: {why}")


def warmup_of(draft: Draft, kind: str) -> tuple[str, float]:
    """The argument that says how long the rate rises, and what it says: steps, or below 1 and of warmup_ratio
    a share of all. Raises ConfigError."""
    args = draft.args
    name = "warmup_steps" if args.warmup_steps else "warmup_ratio"
    asked = getattr(args, name)
    if asked < 0 or (name == "warmup_ratio" and asked > 1):
        wanted = "a share of all steps, 0 to 1" if name == "warmup_ratio" else "0 or more"
        raise ConfigError(f"args.{name} = {asked!r} is refused: should be {wanted}")
    if kind == "constant" and asked:
        draft.notes.append(
            f"args.{name} = {asked} is without effect, as there: lr_scheduler_type = 'constant' has no "
            "warm-up; write 'constant_with_warmup'"
        )
        asked = 0
    return name, float(asked)


def is_share(name: str, asked: float) -> bool:
    """Whether that counts no steps."""
    return name == "warmup_ratio" or 0 < asked < 1


def interval_of(draft: Draft, name: str) -> float:
    """Steps from one to the next of what an argument repeats; below 1 a share of all. Raises ConfigError."""
    value = getattr(draft.args, name)
    if isinstance(value, float) and 0 < value < 1:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ConfigError(
            f"args.{name} = {value!r} is refused: should be a number of steps, or a share below 1"
        )
    return int(value)


def optimizer_of(draft: Draft) -> None:
    """Puts the optimizer with its settings, and the seed, into the draft. Raises ConfigError."""
    optimizer = draft.chosen("optim", (*ADAMW, "sgd"))
    draft.put("optimizer", "adamw" if optimizer in ADAMW else optimizer, "optim")
    if optimizer == "sgd":
        draft.put("momentum", 0.0, "optim")  # torch's default, and so transformers'
    betas = ("adam_beta1", "adam_beta2", "adam_epsilon")
    for name in (*betas, "weight_decay", "max_grad_norm", "seed"):
        draft.take(name, name)
