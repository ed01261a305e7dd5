"""Steps, learning rate and optimizer of a run, from the arguments of a script.

Arguments count optimizer steps, a run counts batches.
"""

from __future__ import annotations

import math

from quartet.config.model import ConfigError
from quartet.scripts.draft import Draft
from quartet.scripts.schedule import (
    SCHEDULERS,
    interval_of,
    is_share,
    optimizer_of,
    scheduler_of,
    settings_of,
    warmup_of,
)

#: The argument that counts them.
EPOCHS = "num_train_epochs"


class Steps:
    """Optimizer steps as batches."""

    def __init__(self, draft: Draft, per_batch: int, of_epochs: int | None = None) -> None:
        """Reads max_steps; `of_epochs`: how many they are where that says none. Raises ConfigError."""
        self._draft, self._per_batch = draft, per_batch
        #: The argument that says how many there are.
        self.said_by = "max_steps"
        if draft.args.max_steps == -1 and of_epochs is not None:
            self.said_by, self.optimizer = EPOCHS, of_epochs
        elif draft.args.max_steps <= 0:
            what = "whatever an epoch of the environment is" if of_epochs is None else "or -1 for epochs"
            raise ConfigError(
                f"args.max_steps = {draft.args.max_steps!r} is refused: a run is as many optimizer steps as "
                f"this says, {what}; set it above 0"
            )
        else:
            self.optimizer = draft.count("max_steps")
        self.total = self.batches(self.optimizer, self.said_by)

    def batches(self, steps: int, name: str) -> int:
        """So many steps, rounded up to whole batches."""
        batches = math.ceil(steps / self._per_batch)
        if steps % self._per_batch:
            said = f"comes to {steps} steps, which are" if name == EPOCHS else f"= {steps} is"
            self._draft.notes.append(
                f"args.{name} {said} taken as {batches * self._per_batch}: a batch is "
                f"{self._per_batch} optimizer steps (num_iterations, generation_batch_size)"
            )
        return batches

    def every(self, name: str, fallback: str | None = None) -> int:
        """The batches between two of what happens every so many steps; below 1 it is a share of all."""
        if fallback is not None and not getattr(self._draft.args, name):
            name = fallback
        asked = interval_of(self._draft, name)
        return self.batches(math.ceil(self.optimizer * asked) if asked < 1 else int(asked), name)


def schedule(draft: Draft, steps: Steps) -> None:
    """Puts max_steps, the learning rate and its schedule into the draft. Raises ConfigError."""
    draft.put("max_steps", steps.total, steps.said_by)
    kind = scheduler_of(draft)
    settings_of(draft, steps.batches, kind)
    _warmup(draft, steps, kind)


def _warmup(draft: Draft, steps: Steps, kind: str) -> None:
    name, asked = warmup_of(draft, kind)
    warmup = math.ceil(steps.optimizer * asked if is_share(name, asked) else asked)
    batches = steps.batches(warmup, "warmup_steps")
    rate = draft.args.learning_rate
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
