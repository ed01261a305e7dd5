"""Steps, learning rate and optimizer of a run, from the arguments of a script.

Arguments count optimizer steps, a run counts batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.draft import Draft

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


class Steps:
    """Optimizer steps as batches."""

    def __init__(self, draft: Draft, per_batch: int) -> None:
        """Reads max_steps. Raises ConfigError."""
        self._draft, self._per_batch = draft, per_batch
        if draft.args.max_steps <= 0:
            raise ConfigError(
                f"args.max_steps = {draft.args.max_steps!r} is refused: a run is as many optimizer steps as "
                "this says, whatever an epoch of the environment is; set it above 0"
            )
        self.optimizer = draft.count("max_steps")
        self.total = self.batches(self.optimizer, "max_steps")

    def batches(self, steps: int, name: str) -> int:
        """So many steps, rounded up to whole batches."""
        batches = math.ceil(steps / self._per_batch)
        if steps % self._per_batch:
            self._draft.notes.append(
                f"args.{name} = {steps} is taken as {batches * self._per_batch}: a batch is "
                f"{self._per_batch} optimizer steps (num_iterations, generation_batch_size)"
            )
        return batches

    def every(self, name: str, fallback: str | None = None) -> int:
        """The batches between two of what happens every so many steps; below 1 it is a share of all."""
        value = getattr(self._draft.args, name)
        if not value and fallback is not None:
            name, value = fallback, getattr(self._draft.args, fallback)
        if isinstance(value, float) and 0 < value < 1:
            value = math.ceil(self.optimizer * value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise ConfigError(
                f"args.{name} = {value!r} is refused: should be a number of steps, or a share below 1"
            )
        return self.batches(int(value), name)


def schedule(draft: Draft, steps: Steps) -> None:
    """Puts max_steps, the learning rate and its schedule into the draft. Raises ConfigError."""
    draft.put("max_steps", steps.total, "max_steps")
    kind = draft.chosen("lr_scheduler_type", tuple(SCHEDULERS))
    draft.put("lr_scheduler", SCHEDULERS[kind], "lr_scheduler_type")
    settings_of(draft, steps.batches, kind)
    _warmup(draft, steps, kind)


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


def _warmup(draft: Draft, steps: Steps, kind: str) -> None:
    args = draft.args
    if not 0 <= args.warmup_ratio <= 1:
        raise ConfigError(
            f"args.warmup_ratio = {args.warmup_ratio!r} is refused: should be a share of max_steps, 0 to 1"
        )
    name = "warmup_steps" if args.warmup_steps else "warmup_ratio"
    asked = getattr(args, name)
    is_share = name == "warmup_ratio" or 0 < asked < 1
    warmup = math.ceil(steps.optimizer * asked) if is_share else math.ceil(asked)
    if kind == "constant":
        if warmup:
            draft.notes.append(
                f"args.{name} = {asked} is without effect, as there: lr_scheduler_type = 'constant' "
                "has no warm-up; write 'constant_with_warmup'"
            )
        warmup = 0
    batches = steps.batches(warmup, "warmup_steps")
    rate = args.learning_rate
    if batches > steps.total:
        # The same ramp, cut off where the run ends.
        rate = rate * steps.total / batches
        draft.notes.append(
            f"args.warmup_steps = {warmup} is more than max_steps: learning_rate rises to {rate:g} only"
        )
        batches = steps.total
    if batches == steps.total and SCHEDULERS[kind] in ("linear", "cosine"):
        draft.put("lr_scheduler", "constant", "lr_scheduler_type")  # nothing is left to fall in
        draft.put("min_lr", 0.0, "lr_scheduler_kwargs")
    draft.put("learning_rate", rate, "learning_rate")
    draft.put("warmup_steps", batches, "warmup_steps")


def optimizer_keys(draft: Draft) -> None:
    """Puts the optimizer, and what else needs no translation, into the draft. Raises ConfigError."""
    optimizer_of(draft)
    draft.take("max_concurrent", "max_concurrent")
    draft.take("num_batches_ahead", "max_off_policy_steps")
    if not draft.args.bf16:
        draft.put("compute_dtype", "float32", "bf16")


def optimizer_of(draft: Draft) -> None:
    """Puts the optimizer with its settings, and the seed, into the draft. Raises ConfigError."""
    optimizer = draft.chosen("optim", (*ADAMW, "sgd"))
    draft.put("optimizer", "adamw" if optimizer in ADAMW else optimizer, "optim")
    if optimizer == "sgd":
        draft.put("momentum", 0.0, "optim")  # torch's default, and so transformers'
    betas = ("adam_beta1", "adam_beta2", "adam_epsilon")
    for name in (*betas, "weight_decay", "max_grad_norm", "seed"):
        draft.take(name, name)
