"""Changes of bf16 weights that deltas are measured on: by an optimizer, and by chance.

The learning rate of the optimizer's step is the one at which the wanted share of the values changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Steps before the one that is measured, so that its moments are an optimizer's under way.
ADAM_STEPS = 8
#: A part of the tensor on which the learning rate is found.
PART_VALUES = 1 << 20
#: Each halves, on a scale of logarithms, where the rate may lie.
BISECTIONS = 40

Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def to_bf16(values: np.ndarray) -> Bits:
    """Round to nearest even, as torch casts."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Change:
    """A tensor before and after."""

    before: Bits
    after: Bits
    learning_rate: float = 0.0


def adamw(count: int, share: float, seed: int) -> Change:
    """One AdamW step that changes this share of the values."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(count, np.float32) * np.float32(0.02)
    drift = rng.standard_normal(count, np.float32)
    first = np.zeros(count, np.float32)
    second = np.zeros(count, np.float32)
    for _ in range(ADAM_STEPS):
        gradient = 0.3 * drift + rng.standard_normal(count, np.float32)
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.05) * (gradient * gradient - second)
    corrected = (first / np.float32(1 - 0.9**ADAM_STEPS)) / np.sqrt(second / np.float32(1 - 0.95**ADAM_STEPS))
    before = to_bf16(master)
    low, high = 1e-9, 1.0
    # On a part of the tensor: the share grows with the rate.
    part = slice(0, PART_VALUES)
    for _ in range(BISECTIONS):
        rate = (low * high) ** 0.5
        moved = to_bf16(master[part] - np.float32(rate) * corrected[part])
        low, high = (rate, high) if np.mean(moved != before[part]) < share else (low, rate)
    return Change(before, to_bf16(master - np.float32(low) * corrected), low)


def random_bits(count: int, share: float, seed: int) -> Change:
    """That share of the values replaced by random bits."""
    rng = np.random.default_rng(seed)
    before = to_bf16(rng.standard_normal(count, np.float32) * np.float32(0.02))
    hit = rng.random(count, np.float32) < share
    return Change(before, np.where(hit, rng.integers(0, 1 << 16, count, np.uint16), before))


def steps_moved(change: Change) -> np.ndarray:
    """How many representable numbers the changed values moved."""
    before, after = (bits.view(np.int16).astype(np.int32) for bits in (change.before, change.after))
    ordered = [np.where(bits < 0, -1 - (bits & 0x7FFF), bits) for bits in (before, after)]
    moved = np.abs(ordered[1] - ordered[0])
    return moved[moved > 0]
