"""TrainingSample of the contract to Sample of the domain."""

from __future__ import annotations

import numpy as np
from quartet import experts
from quartet.errors import refused
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.sample import Experts, Sample, make_sample


def training_sample(index: int, sample: pb.TrainingSample) -> Sample:
    """A sample of a batch. Errors: INVALID_REQUEST."""
    inner = sample.sample
    spans = [(span.start, span.length, span.policy_version) for span in inner.spans]
    given = sample.reference_logprobs
    if given and inner.reference_logprobs:
        field = f"samples[{index}].reference_logprobs"
        raise refused(field, len(given), "give them here or in the sample itself, not in both")
    experts_TNk = _experts(index, inner.experts) if inner.HasField("experts") else None
    return make_sample(
        index,
        inner.token_ids,
        spans,
        inner.logprobs,
        sample.advantages,
        given or inner.reference_logprobs,
        experts_TNk,
    )


def _experts(index: int, told: rollout_pb2.RoutedExperts) -> Experts:
    field = f"samples[{index}].sample.experts"
    if told.start:
        raise refused(f"{field}.start", told.start, "tell the experts from position 0 on")
    if not experts.sound(told):
        value = f"{len(told.numbers)} bytes of {told.layers} x {told.slots} numbers of {told.width} bytes"
        remedy = "send layers x slots numbers of 1 or 2 bytes for each token, of one token at least, or none"
        raise refused(field, value, remedy)
    numbers = np.frombuffer(told.numbers, f"<u{told.width}")
    return numbers.reshape(-1, told.layers, told.slots)
