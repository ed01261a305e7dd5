"""One sequence to train on or to score, checked, as arrays. No torch, no proto.

1. A Sample that exists is well formed: every covered position has a token before it, all arrays agree, all
   numbers are finite, and no probability is above 1.
2. Whoever sent a malformed one learns which sample, which field, which value.

Shapes: T tokens, K covered positions, N routers, k experts that take a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from quartet.errors import QuartetError
from quartet.trainable import MAX_LOGPROB, MAX_VERSION

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
#: Numbers of experts: uint8 or uint16.
Experts = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens, the positions that the loss covers, and what belongs to each of these."""

    tokens_T: Ints
    covered_K: Ints
    versions_K: Ints
    # The sampler's; None where it sent none.
    logprobs_K: Floats | None
    # One value for each covered position; None where none were sent.
    advantages_K: Floats | None
    # A reference's log-probabilities; None where none were sent.
    reference_K: Floats | None = None
    # Which experts took the first tokens, in each router, as many as are told; None: none.
    experts_TNk: Experts | None = None

    @property
    def is_covered(self) -> bool:
        """Whether any position is covered."""
        return len(self.covered_K) > 0

    @property
    def prompt_length(self) -> int:
        """Tokens before the first covered position."""
        return int(self.covered_K[0])

    @property
    def input_length(self) -> int:
        """Tokens that a forward pass must read: those before the last covered position."""
        return int(self.covered_K[-1])


def make_sample(
    index: int,
    token_ids: Sequence[int],
    spans: Sequence[tuple[int, int, int]],
    logprobs: Sequence[float],
    advantages: Sequence[float],
    reference: Sequence[float] = (),
    experts_TNk: Experts | None = None,
) -> Sample:
    """Check one sample; spans are (start, length, policy_version). Errors: INVALID_REQUEST."""
    tokens_T = np.array(token_ids, dtype=np.int64)
    if not len(tokens_T):
        raise _refused(index, "token_ids", "empty", "send at least one token")
    end = count = 0
    for start, length, version in spans:
        if start < end or length < 1 or start + length > len(tokens_T):
            value = f"[{start}, {start + length}) of {len(tokens_T)} tokens"
            raise _refused(index, "spans", value, "spans are ascending, disjoint and inside the tokens")
        if start == 0:
            raise _refused(index, "spans", "position 0", "the first token has no prediction; cover from 1 on")
        if version > MAX_VERSION:
            remedy = "a version counts optimizer steps; send the sampler's, or 0 where there is none"
            raise _refused(index, "spans", f"policy_version {version}", remedy)
        end = start + length
        count += length
    covered = [np.arange(start, start + length) for start, length, _ in spans]
    versions = [_filled(length, version, np.int64) for _, length, version in spans]
    return Sample(
        tokens_T,
        _joined(covered),
        _joined(versions),
        _per_position(index, "logprobs", logprobs, (0, count), count, MAX_LOGPROB),
        _per_position(index, "advantages", advantages, (0, 1, count), count),
        _per_position(index, "reference_logprobs", reference, (0, count), count, MAX_LOGPROB),
        experts_TNk,
    )


def check_against_model(
    samples: Sequence[Sample], vocab_size: int, max_tokens: int, model: str = "the model"
) -> None:
    """Refuse tokens that a model does not have and sequences it has no positions for; `model` is what errors
    call it.

    Errors: INVALID_REQUEST.
    """
    for index, sample in enumerate(samples):
        highest = int(sample.tokens_T.max())
        if highest >= vocab_size:
            raise _refused(
                index, "token_ids", str(highest), f"the vocabulary of {model} has {vocab_size} tokens"
            )
        if len(sample.tokens_T) > max_tokens:
            value = f"{len(sample.tokens_T)} tokens"
            raise _refused(index, "token_ids", value, f"{model} takes at most {max_tokens}: docs/trainer.md")


def _filled(count: int, value: float, dtype: type[Any]) -> npt.NDArray[Any]:
    # As np.full does, in a third of its time.
    array = np.empty(count, dtype)
    array.fill(value)
    return array


def _joined(parts: Sequence[Ints]) -> Ints:
    # Most samples have one span, and joining costs as much as all else here.
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _per_position(
    index: int,
    field: str,
    values: Sequence[float],
    allowed: tuple[int, ...],
    count: int,
    at_most: float = math.inf,
) -> Floats | None:
    if len(values) not in allowed:
        raise _refused(index, field, f"{len(values)} values", f"{count} positions are covered")
    if not values:
        return None
    if len(values) == 1:
        array = _filled(count, values[0], np.float32)
        highest = lowest = values[0]
    else:
        array = np.array(values, dtype=np.float32)
        # Not a number is the largest of any: a third of the time of isfinite() and count_nonzero().
        highest, lowest = array.item(array.argmax()), array.item(array.argmin())
    extreme = lowest if math.isfinite(highest) else highest
    if not math.isfinite(extreme):
        raise _refused(index, field, str(extreme), "every value must be finite")
    if highest > at_most:
        remedy = "send log(p), which is never above 0; not its negative, nor p"
        raise _refused(index, field, f"{highest:g}", remedy)
    return array


def _refused(index: int, field: str, value: str, remedy: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"sample {index}: {field} is {value}; {remedy}",
        field=f"samples[{index}].{field}",
        value=value,
        remedy=remedy,
    )
