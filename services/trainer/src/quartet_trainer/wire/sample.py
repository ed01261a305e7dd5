"""TrainingSample of the contract to Sample of the domain."""

from __future__ import annotations

from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.wire.refusal import request


def training_sample(index: int, sample: pb.TrainingSample) -> Sample:
    """A sample of a batch. Errors: INVALID_REQUEST."""
    if sample.reference_logprobs:
        field = f"samples[{index}].reference_logprobs"
        raise request(
            field, len(sample.reference_logprobs), "no loss of this build uses them; leave them out"
        )
    inner = sample.sample
    spans = [(span.start, span.length, span.policy_version) for span in inner.spans]
    return make_sample(index, inner.token_ids, spans, inner.logprobs, sample.advantages)
