"""A batch to train on: what its loss demands of its samples, and what is reported about it.

1. A batch that passes `check_batch` computes: every token is in the vocabulary, and every covered position
   has what the loss reads there.
2. Whoever sent one that does not learns which sample and which field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from quartet.errors import QuartetError
from torch import Tensor

from quartet_trainer.loss import diagnostics
from quartet_trainer.sample import Floats, Sample, check_against_model
from quartet_trainer.spec import LossSpec, Ratio


def check_batch(samples: Sequence[Sample], loss: LossSpec, vocab_size: int, max_tokens: int) -> None:
    """Errors: INVALID_REQUEST."""
    check_against_model(samples, vocab_size, max_tokens)
    if not any(sample.is_covered for sample in samples):
        raise _refused("samples", "no position of the batch is covered", "give the samples spans")
    for index, sample in enumerate(samples):
        if not sample.is_covered or loss.ratio is Ratio.CROSS_ENTROPY:
            continue
        if sample.advantages_K is None:
            field = f"samples[{index}].advantages"
            raise _refused(field, "a policy gradient needs advantages", "send one, or one for each position")
        if sample.logprobs_K is None and loss.ratio is not Ratio.NONE:
            field = f"samples[{index}].sample.logprobs"
            raise _refused(field, f"{loss.ratio.value} needs the sampler's log-probabilities", "send them")


def weights_of(sample: Sample) -> Floats:
    """What multiplies the log-probability of each covered position."""
    if sample.advantages_K is None:
        return np.ones(len(sample.covered_K), dtype=np.float32)
    return sample.advantages_K


def diagnose(
    samples: Sequence[Sample],
    weights: Sequence[Floats],
    loss: LossSpec,
    logprobs: Sequence[Floats],
    entropies: Sequence[Floats],
) -> dict[str, float]:
    """Diagnostics over all covered tokens of a batch, from the outputs of its forward pass."""
    covered = [index for index, sample in enumerate(samples) if sample.is_covered]

    def joined(arrays: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[index] for index in covered]))

    sampled = [sample.logprobs_K for sample in samples]
    complete = all(sampled[index] is not None for index in covered)
    return diagnostics(
        loss, joined(logprobs), joined(sampled) if complete else None, joined(weights), joined(entropies)
    )


def _refused(field: str, what: str, remedy: str) -> QuartetError:
    return QuartetError("INVALID_REQUEST", f"{field}: {what}; {remedy}", field=field, remedy=remedy)
