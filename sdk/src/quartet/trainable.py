"""What a trainer takes of a sample: the rules of the contract's Sample, looked at on the message.

A trainer refuses all of a batch for one sample that breaks them, so whoever takes samples from others looks
first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quartet.v1.rollout_pb2 import Sample

#: A sampler that rounds to bfloat16 may report a little more than 0; a negative log-probability is more.
MAX_LOGPROB: Final = 0.1
#: Of all samples of one ForwardBackward or Forward call, as serialised, without their experts.
MAX_CALL_BYTES: Final = 1 << 30
#: What a token of it takes there, and a log-probability of one that was sampled.
TOKEN_BYTES, LOGPROB_BYTES = 3, 4
#: From so many values on NumPy is worth its import: 0.2 s, once, which short answers never pay.
MANY_VALUES: Final = 4096
#: Versions count optimizer steps.
MAX_VERSION: Final = 2**63 - 1


def call_bytes(tokens: float, sampled: float, *, referenced: bool) -> float:
    """About what a call of so many tokens carries; `referenced`: a teacher has scored what was sampled, too.
    MAX_CALL_BYTES are some 150 million sampled tokens, or 98 million."""
    return TOKEN_BYTES * tokens + LOGPROB_BYTES * (2 if referenced else 1) * sampled


def no_logprob(values: Sequence[float]) -> float | None:
    """The first that is no log-probability: not finite, or above what rounding makes of 0."""
    if len(values) >= MANY_VALUES:
        import numpy as np

        # As Python compares: the bound is no float32.
        values_T = np.asarray(values, np.float64)
        values = values_T[~((values_T > -math.inf) & (values_T <= MAX_LOGPROB))].tolist()
    return next((value for value in values if not -math.inf < value <= MAX_LOGPROB), None)


def flaw(sample: Sample) -> str:
    """What a trainer would refuse it for, beside its experts; empty where there is nothing. Covered tokens
    without log-probabilities, which a trainer takes as supervised data, are one: they were sampled."""
    tokens, covered, end = len(sample.token_ids), 0, 1
    if not tokens:
        return "a sample has no tokens"
    for span in sample.spans:
        if span.start < end or not span.length or span.start + span.length > tokens:
            where = f"[{span.start}, {span.start + span.length})"
            return f"a span covers {where} of {tokens} tokens, behind those before {end}"
        if span.policy_version > MAX_VERSION:
            return f"a span is of version {span.policy_version}"
        end = span.start + span.length
        covered += span.length
    if len(sample.logprobs) != covered:
        return f"spans cover {covered} tokens, and {len(sample.logprobs)} were sampled"
    if len(sample.reference_logprobs) not in (0, covered):
        return f"a reference scored {len(sample.reference_logprobs)} of {covered} tokens"
    for name in ("logprobs", "reference_logprobs"):
        if (value := no_logprob(getattr(sample, name))) is not None:
            return f"one of its {name} is {value:g}"
    return ""
