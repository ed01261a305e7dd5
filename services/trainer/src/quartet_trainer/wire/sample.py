"""TrainingSample of the contract to Sample of the domain."""

from __future__ import annotations

from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.sample import Sample, make_sample


def training_sample(index: int, sample: pb.TrainingSample) -> Sample:
    """A sample of a batch. Errors: INVALID_REQUEST."""
    inner = sample.sample
    spans = [(span.start, span.length, span.policy_version) for span in inner.spans]
    return make_sample(
        index, inner.token_ids, spans, inner.logprobs, sample.advantages, sample.reference_logprobs
    )
