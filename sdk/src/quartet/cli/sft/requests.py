"""What a fine-tuning asks of its trainer, as it travels. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quartet.cli.sft.rendered import covered
from quartet.run.learning import optimizer_spec
from quartet.run.lora import lora_spec
from quartet.run.sft import SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import Sample

RUN_ID = "sft"
# Well below the limit of a message, 4 MiB.
FRAME_BYTES = 1 << 20


def run_spec(config: SftConfig, steps: int) -> pb.RunSpec:
    """What CreateRun asks for, for a fine-tuning of so many steps."""
    return pb.RunSpec(
        base_model=config.model,
        optimizer=optimizer_spec(*config.scheduled(steps)),
        lora=lora_spec(config.lora),
        seed=config.seed,
        microbatch_tokens=config.microbatch_tokens,
    )


def frames(samples: Sequence[Sample], seq_id: int) -> Iterator[pb.ForwardBackwardRequest]:
    """A batch to learn from: the loss is the mean over its covered tokens."""
    start = pb.ForwardBackwardStart(
        run_id=RUN_ID,
        seq_id=seq_id,
        loss=pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY),
        normalizer=covered(samples),
    )
    return _framed(pb.ForwardBackwardRequest, start, samples)


def scoring_frames(samples: Sequence[Sample]) -> Iterator[pb.ForwardRequest]:
    """Samples whose covered tokens are scored by the weights as they are."""
    return _framed(pb.ForwardRequest, pb.ForwardStart(run_id=RUN_ID, tells_best=True), samples)


def _framed(kind: type[Any], start: Any, samples: Sequence[Sample]) -> Iterator[Any]:
    yield kind(start=start)
    part, size = pb.SampleBatch(), 0
    for sample in samples:
        more = sample.ByteSize()  # that of the part would be counted anew for each
        if part.samples and size + more > FRAME_BYTES:
            yield kind(batch=part)
            part, size = pb.SampleBatch(), 0
        part.samples.append(pb.TrainingSample(sample=sample))
        size += more
    if part.samples:
        yield kind(batch=part)
    tokens = sum(len(sample.token_ids) for sample in samples)
    yield kind(commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens))
