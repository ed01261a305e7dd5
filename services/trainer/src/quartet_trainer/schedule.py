"""The learning rate of a step: warm-up, then a schedule. It follows from the spec and the step alone, so a
restored run continues on its schedule.

With peak p, end m = min_lr, w = warmup_steps, n = total_steps, d = decay_steps; steps s count from 0.

  warm-up              p * (s + 1) / w                                  s < w, whatever the schedule
  constant             p
  linear               m + (p - m) * (1 - (s - w) / (n - w))
  cosine               m + (p - m) * (1 + cos(pi * (s - w) / (n - w))) / 2
  warmup_stable_decay  p while s < n - d, then m + (p - m) * (n - s) / d

From s = n on a schedule that ends stays at m. Of a run that was extended, n is for each step the
total_steps that the run had then: steps before an extension keep their rates, also where they are replayed.
"""

from __future__ import annotations

import math

from quartet_trainer.spec.optimizer import OptimizerSpec, Schedule


def scheduled_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of a step. Warm-up reaches the peak in its last step."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    total_steps = next((total for total in spec.earlier_total_steps if step < total), spec.total_steps)
    return spec.min_lr + (spec.learning_rate - spec.min_lr) * _share_left(spec, step, total_steps)


def _share_left(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Of the way from the peak to the end."""
    if spec.schedule is Schedule.CONSTANT:
        return 1.0
    if spec.schedule is Schedule.WARMUP_STABLE_DECAY:
        return max(0.0, min(1.0, (total_steps - step) / spec.decay_steps))
    progress = min(1.0, (step - spec.warmup_steps) / (total_steps - spec.warmup_steps))
    if spec.schedule is Schedule.LINEAR:
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
