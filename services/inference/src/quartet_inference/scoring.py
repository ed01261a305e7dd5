"""From ScoreRequest to what the engine scores: bounds, and the reason why a sample is refused."""

from __future__ import annotations

from quartet.errors import QuartetError, refused
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import rollout_pb2

from quartet_inference.engine import EngineInfo, ScoreRequest

#: Samples of one call: each costs a task, however short it is.
MAX_SAMPLES = 1024
#: Covered positions of one call: the answer has four bytes for each, in a message of at most 4 MiB.
MAX_COVERED = 900_000


def resolve_samples(request: pb.ScoreRequest, info: EngineInfo) -> list[ScoreRequest]:
    """Check the samples of a call. Errors: INVALID_REQUEST, PROMPT_TOO_LONG."""
    if len(request.samples) > MAX_SAMPLES:
        raise refused("samples", len(request.samples), f"send at most {MAX_SAMPLES} in one call")
    total = sum(span.length for sample in request.samples for span in sample.spans)
    if total > MAX_COVERED:
        raise refused("samples.spans", total, f"cover at most {MAX_COVERED} positions in one call")
    exact = request.exact_policy_version if request.HasField("exact_policy_version") else None
    return [
        ScoreRequest(_tokens(index, sample, info), _covered(index, sample), request.run_id, exact)
        for index, sample in enumerate(request.samples)
    ]


def _tokens(index: int, sample: rollout_pb2.Sample, info: EngineInfo) -> tuple[int, ...]:
    field = f"samples[{index}].token_ids"
    if not sample.token_ids:
        raise refused(field, "empty", "send at least one token")
    if len(sample.token_ids) > info.max_model_len:
        raise QuartetError(
            "PROMPT_TOO_LONG",
            f"{field}: {len(sample.token_ids)} tokens, the model takes at most {info.max_model_len}",
            tokens=len(sample.token_ids),
            limit=info.max_model_len,
        )
    if max(sample.token_ids) >= info.vocab_size:
        remedy = f"send tokens below the vocabulary's size, {info.vocab_size}"
        raise refused(field, max(sample.token_ids), remedy)
    return tuple(sample.token_ids)


def _covered(index: int, sample: rollout_pb2.Sample) -> tuple[tuple[int, int], ...]:
    field, end = f"samples[{index}].spans", 1
    for span in sample.spans:
        value = f"[{span.start}, {span.start + span.length}) of {len(sample.token_ids)} tokens"
        if span.start == 0:
            raise refused(field, value, "the first token has no prediction; cover from 1 on")
        if span.start < end or span.length < 1 or span.start + span.length > len(sample.token_ids):
            raise refused(field, value, "make spans ascending, disjoint and inside the tokens")
        end = span.start + span.length
    return tuple((span.start, span.length) for span in sample.spans)
