"""A batch to train on: what its loss demands of its samples, what it reads of them, and what is reported.

1. A batch that passes `check_batch` computes: every token is in the vocabulary, and every covered position
   has what the loss reads there.
2. Whoever sent one that does not learns which sample and which field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from quartet.errors import QuartetError
from torch import Tensor

from quartet_trainer.loss import Tokens, diagnostics
from quartet_trainer.sample import Floats, Sample, check_against_model
from quartet_trainer.spec import LossKind, LossSpec

Bools = npt.NDArray[np.bool_]
Column = Sequence[Floats | None] | Sequence[Bools]


def check_batch(
    samples: Sequence[Sample],
    loss: LossSpec,
    *,
    vocab_size: int,
    max_tokens: int,
    holds_reference: bool,
    custom: Collection[str],
) -> None:
    """Errors: INVALID_REQUEST."""
    check_against_model(samples, vocab_size, max_tokens)
    if loss.kind is LossKind.CUSTOM and loss.custom not in custom:
        known = ", ".join(sorted(custom)) or "none"
        raise _refused(
            "loss.custom", f"{loss.custom!r} is not among this trainer's losses ({known})", "name one"
        )
    covered = {index: sample for index, sample in enumerate(samples) if sample.is_covered}
    if not covered:
        raise _refused("samples", "no position of the batch is covered", "give the samples spans")
    if loss.kind is LossKind.CUSTOM:
        _check_whole("logprobs", {index: sample.logprobs_K for index, sample in covered.items()})
        _check_whole("reference_logprobs", {index: sample.reference_K for index, sample in covered.items()})
    # Once some samples carry a reference's log-probabilities, those of the others cannot be guessed.
    sent = any(sample.reference_K is not None for sample in covered.values())
    for index, sample in covered.items():
        if sample.advantages_K is None and loss.needs_advantages:
            field = f"samples[{index}].advantages"
            raise _refused(field, "a policy gradient needs advantages", "send one, or one for each position")
        if sample.logprobs_K is None and _reads_sampler(loss):
            field = f"samples[{index}].logprobs"
            raise _refused(field, f"{loss.ratio.value} needs the sampler's log-probabilities", "send them")
        if sample.reference_K is None and loss.needs_reference and (sent or not holds_reference):
            field = f"samples[{index}].reference_logprobs"
            raise _refused(
                field,
                "the loss reads a reference's log-probabilities",
                "send them, or create the run with one",
            )


def _check_whole(name: str, column: Mapping[int, Floats | None]) -> None:
    """Whether all have it, or none: what a loss of one's own sees must not depend on which samples share a
    micro-batch. Errors: INVALID_REQUEST."""
    without = next((index for index, values in column.items() if values is None), None)
    if without is not None and any(values is not None for values in column.values()):
        what = "others of the batch have them, and a loss of one's own reads those of all or of none"
        raise _refused(f"samples[{without}].{name}", what, "send them, or leave all out")


def _reads_sampler(loss: LossSpec) -> bool:
    return loss.compares and (
        loss.proximal_version is None or loss.correction is not None or loss.off_policy_mask is not None
    )


def weights_of(sample: Sample, loss: LossSpec) -> Floats:
    """What multiplies the log-probability of each covered position."""
    if sample.advantages_K is not None:
        return sample.advantages_K
    # What a reference thinks of a token is added to them; likelihood alone counts every token once.
    nothing = loss.kind is LossKind.REFERENCE_KL
    return np.full(len(sample.covered_K), 0.0 if nothing else 1.0, dtype=np.float32)


def highest(values: Sequence[Floats], share: float) -> list[Bools]:
    """Which of the values of a batch are in this share of them, the highest: not below the quantile, which is
    linear between two values. Where one is no number all are, so that a loss over them is none either."""
    threshold = np.quantile(np.concatenate(values), 1.0 - share)
    return [~(values_K < threshold) for values_K in values]


@dataclass(frozen=True, slots=True)
class Columns:
    """What a loss reads beside the policy's own values: one array for each sample."""

    advantages: Sequence[Floats]
    sampled: Column
    reference: Column
    device: torch.device
    # None: there is no proximal policy, or it is the one that learns.
    proximal: Column | None = None
    proximal_is_live: bool = False
    # Which covered positions are among those of the highest entropy; None: the loss does not ask.
    top_entropy: Sequence[Bools] | None = None

    def tokens(self, members: Sequence[int], logp_K: Tensor, entropy_K: Tensor) -> Tokens:
        """Those of some samples, with what the policy says of them."""
        advantages_K = self._joined(self.advantages, members)
        assert advantages_K is not None
        lengths = [len(self.advantages[member]) for member in members]
        proximal_K = None if self.proximal is None else self._joined(self.proximal, members)
        top_entropy_K = None if self.top_entropy is None else self._joined(self.top_entropy, members)
        return Tokens(
            logp_K,
            entropy_K,
            advantages_K,
            torch.tensor(lengths, device=self.device),
            self._joined(self.sampled, members),
            logp_K.detach() if self.proximal_is_live else proximal_K,
            self._joined(self.reference, members),
            top_entropy_K,
        )

    def _joined(self, column: Column, members: Sequence[int]) -> Tensor | None:
        present = [array for member in members if (array := column[member]) is not None]
        if len(present) < len(members):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self.device)


def diagnose(
    columns: Columns, loss: LossSpec, logprobs: Sequence[Floats], entropies: Sequence[Floats]
) -> dict[str, float]:
    """Diagnostics over all covered tokens of a batch, from the outputs of its forward pass."""
    covered = [index for index, advantages in enumerate(columns.advantages) if len(advantages)]

    def joined(arrays: Sequence[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[index] for index in covered])).to(columns.device)

    return diagnostics(loss, columns.tokens(covered, joined(logprobs), joined(entropies)))


def _refused(field: str, what: str, remedy: str) -> QuartetError:
    return QuartetError("INVALID_REQUEST", f"{field}: {what}; {remedy}", field=field, remedy=remedy)
