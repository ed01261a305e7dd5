"""Batches: from groups of rollouts to the frames that the trainer's ForwardBackward takes.

1. The same records give the same frames, bit for bit, so a batch that is sent again after a restart is the
   same batch.
2. Samples are forwarded as the environment host gave them: whole messages are copied, tokens are never
   touched one by one.
3. A frame stays below FRAME_BYTES plus one sample, so below the 4 MiB limit of messages.
4. What tells of experts is left out of the samples that come after experts.MAX_CALL_BYTES of it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quartet import experts
from quartet.run.algorithm import AlgorithmConfig
from quartet.run.config import RunConfig
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout, Sample

from quartet_orchestrator import credit, parts
from quartet_orchestrator.credit import Size

# A frame is sent when it has grown this large: small enough that the trainer unpacks one while the next is
# packed, large enough that to send it costs less than to pack it.
FRAME_BYTES = 1 << 17
# The most that a token, a log-probability and a span take on the wire; and, of each sample, length prefixes,
# tags and the advantage.
TOKEN_BYTES, LOGPROB_BYTES, SPAN_BYTES, SAMPLE_OVERHEAD_BYTES = 5, 4, 25, 48


def covered_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens of these that have their sampler's log-probability."""
    return sum(len(sample.logprobs) for rollout in rollouts for sample in rollout.samples)


def size_of(rollout: Rollout) -> Size:
    """Covered tokens and samples of one rollout."""
    return Size(covered_tokens([rollout]), len(rollout.samples))


def without_overlong(
    rollouts: list[Rollout], advantages: list[list[float]]
) -> tuple[list[Rollout], list[list[float]]]:
    """Those that no limit cut, with their advantages; if there are none, all of them, with 0 as advantage."""
    whole = [index for index, rollout in enumerate(rollouts) if not rollout.truncated]
    if not whole:
        return rollouts, [[0.0] * len(rollout.samples) for rollout in rollouts]
    return [rollouts[index] for index in whole], [advantages[index] for index in whole]


def with_advantage(
    rollouts: list[Rollout], advantages: list[list[float]]
) -> tuple[list[Rollout], list[list[float]]]:
    """Those of which some sample has an advantage, with their advantages; if there are none, all of them."""
    kept = [index for index, its_own in enumerate(advantages) if any(its_own)]
    if not kept:
        return rollouts, advantages
    return [rollouts[index] for index in kept], [advantages[index] for index in kept]


def credited(
    algorithm: AlgorithmConfig,
    groups: Sequence[Sequence[Rollout]],
    minibatch: int | None = None,
    own: parts.Own | None = None,
) -> tuple[list[Rollout], list[list[float]]]:
    """Those of a batch, or of a mini-batch of it, that are trained on, and the advantage of each of their
    samples: credit compares across the batch, whatever its parts. `own` is what advantage = "custom" goes by.
    """
    rollouts = [rollout for group in groups for rollout in group]
    advantages = parts.advantages(
        algorithm.advantage, groups, own, algorithm.overlong_penalty, algorithm.reward_weights
    )
    if minibatch is not None:
        size = len(groups) // algorithm.num_minibatches
        first, end = (sum(map(len, groups[: size * number])) for number in (minibatch, minibatch + 1))
        rollouts, advantages = rollouts[first:end], advantages[first:end]
    if algorithm.overlong_filtering:
        rollouts, advantages = without_overlong(rollouts, advantages)
    if algorithm.zero_advantage_filtering:
        rollouts, advantages = with_advantage(rollouts, advantages)
    return rollouts, advantages


def normalizer(config: RunConfig, rollouts: Sequence[Rollout], *, minibatches: int = 1) -> float:
    """What the summed loss of a batch, or of one of its mini-batches, is divided by; these are trained on."""
    return credit.normalizer(
        config.algorithm.normalised_by,
        sum(map(size_of, rollouts), Size()),
        rollouts=config.batch_size // minibatches,
        constant_tokens=config.constant_tokens,
    )


def frames(
    start: tpb.ForwardBackwardStart, rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]]
) -> Iterator[tpb.ForwardBackwardRequest]:
    """Start, samples, commit. `advantages` are those of each rollout's samples."""
    yield tpb.ForwardBackwardRequest(start=start)
    frame, size = tpb.ForwardBackwardRequest(), 0
    samples = tokens = experts_bytes = 0
    for rollout, its_own in zip(rollouts, advantages, strict=True):
        for sample, advantage in zip(rollout.samples, its_own, strict=True):
            grown = _most_bytes(sample)
            if size and size + grown > FRAME_BYTES:
                yield frame
                frame, size = tpb.ForwardBackwardRequest(), 0
            # In place: a message given to a constructor or appended is serialised and parsed again.
            sent = frame.batch.samples.add()
            sent.sample.CopyFrom(sample)
            sent.advantages.append(advantage)
            if sample.reference_logprobs:
                sent.reference_logprobs.extend(sample.reference_logprobs)
                sent.sample.ClearField("reference_logprobs")
            size += grown
            experts_bytes += len(sample.experts.numbers)
            if experts_bytes > experts.MAX_CALL_BYTES:
                sent.sample.ClearField("experts")
            samples += 1
            tokens += len(sample.token_ids)
    if size:
        yield frame
    yield tpb.ForwardBackwardRequest(commit=tpb.StreamCommit(sample_count=samples, token_count=tokens))


def _most_bytes(sample: Sample) -> int:
    """Of a sample in a frame. Not its ByteSize, which serialises it to see."""
    logprobs = len(sample.logprobs) + len(sample.reference_logprobs)
    return (
        SAMPLE_OVERHEAD_BYTES
        + TOKEN_BYTES * len(sample.token_ids)
        + LOGPROB_BYTES * logprobs
        + SPAN_BYTES * len(sample.spans)
        + len(sample.experts.numbers)
    )
