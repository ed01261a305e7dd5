"""The canary of a version: what the trainer's own forward pass says of a fixed sequence under the published
weights, so that a replica can tell whether the weights in its engine are these.

1. The sequence depends on the vocabulary alone: equal weights have equal canaries.
2. The published cast is scored, in float32, as verification scores it; on an accelerator what is published in
   bfloat16 is scored as the policy computes, because a float32 copy of a large model has no room beside it.
3. Weights without finite log-probabilities have no canary: no replica could agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from quartet.v1 import weights_pb2 as pb

from quartet_trainer.publish import Snapshot
from quartet_trainer.sample import Floats, Sample, make_sample

#: Canary.token_ids holds no more; each of them reads other rows of the embedding.
CANARY_TOKENS = 64
#: Odd and far from any structure of a vocabulary, so that the tokens are spread over it (Knuth's).
SPREAD = 2654435761

#: Log-probabilities of the covered positions of each sample under given weights, at a temperature.
Score = Callable[[Sequence[Sample], Snapshot, float], Sequence[Floats]]


def canary(score: Score, weights: Snapshot, vocab_size: int, max_positions: int) -> pb.Canary | None:
    """What a replica must reproduce."""
    tokens = [SPREAD * (place + 1) % 2**32 % vocab_size for place in range(min(CANARY_TOKENS, max_positions))]
    if len(tokens) < 2:
        return None
    sample = make_sample(0, tokens, [(1, len(tokens) - 1, 0)], [], [])
    (logprobs_K,) = score([sample], weights, 1.0)
    if not np.isfinite(logprobs_K).all():
        return None
    return pb.Canary(token_ids=tokens, logprobs=logprobs_K.tolist())
