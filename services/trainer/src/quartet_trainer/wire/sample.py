"""TrainingSample of the contract to Sample of the domain."""

from __future__ import annotations

import numpy as np
from quartet.errors import refused
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.sample import Experts, Sample, make_sample

#: Of a number of RoutedExperts.
WIDTHS = (1, 2)


def training_sample(index: int, sample: pb.TrainingSample) -> Sample:
    """A sample of a batch. Errors: INVALID_REQUEST."""
    inner = sample.sample
    spans = [(span.start, span.length, span.policy_version) for span in inner.spans]
    experts_TNk = _experts(index, inner.experts) if inner.HasField("experts") else None
    return make_sample(
        index,
        inner.token_ids,
        spans,
        inner.logprobs,
        sample.advantages,
        sample.reference_logprobs,
        experts_TNk,
    )


def _experts(index: int, told: rollout_pb2.RoutedExperts) -> Experts:
    field = f"samples[{index}].sample.experts"
    if told.start:
        raise refused(f"{field}.start", told.start, "tell the experts from position 0 on")
    if told.width not in WIDTHS or not told.layers or not told.slots:
        value = f"{told.layers} layers, {told.slots} slots, {told.width} bytes"
        raise refused(field, value, "numbers have 1 or 2 bytes, in at least one layer and slot")
    row = told.layers * told.slots * told.width
    if len(told.numbers) % row:
        raise refused(f"{field}.numbers", f"{len(told.numbers)} bytes", f"send {row} for each token")
    numbers = np.frombuffer(told.numbers, f"<u{told.width}")
    return numbers.reshape(-1, told.layers, told.slots)
