"""What is looked at before a batch is made is what the trainer's own parser refuses: no more, no less."""

from __future__ import annotations

import math
import random

import pytest
from quartet.errors import QuartetError
from quartet.trainable import MANY_VALUES, MAX_LOGPROB, MAX_VERSION, flaw
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from quartet.v1.trainer_service_pb2 import TrainingSample
from quartet_trainer.wire import training_sample

SAMPLES = 3000


def drawn(chance: random.Random) -> Sample:
    """A sample of a few tokens, often well formed."""
    sample = Sample(token_ids=range(chance.randrange(0 if chance.random() < 0.1 else 1, 8)))
    start = 1
    while start < len(sample.token_ids) and chance.random() < 0.8:
        length = chance.randrange(1, len(sample.token_ids) - start + 1)
        sample.spans.append(PolicySpan(start=start, length=length, policy_version=chance.randrange(3)))
        start += length + chance.randrange(2)
    covered = sum(span.length for span in sample.spans)
    sample.logprobs.extend(-chance.random() for _ in range(covered))
    if chance.random() < 0.5:
        sample.reference_logprobs.extend(-chance.random() for _ in range(covered))
    return sample


def bent(sample: Sample, chance: random.Random) -> None:
    """Something about it is otherwise, and maybe wrong."""
    values = chance.choice([sample.logprobs, sample.reference_logprobs])
    way = chance.randrange(5)
    if way == 0 and values:
        strange = [math.nan, math.inf, -math.inf, 0.0, 0.05, 0.2, 3.0, -1e30]
        values[chance.randrange(len(values))] = chance.choice(strange)
    elif way == 1:
        values.append(-1.0)
    elif way == 2 and values:
        del values[-1]
    elif sample.spans:
        span = chance.choice(sample.spans)
        if way == 3:
            span.start = chance.randrange(len(sample.token_ids) + 2)
        elif chance.random() < 0.5:
            span.length = chance.randrange(4)
        else:
            span.policy_version = chance.choice([0, MAX_VERSION, MAX_VERSION + 1])


def refused(sample: Sample) -> bool:
    try:
        training_sample(0, TrainingSample(sample=sample, advantages=[0.5]))
    except QuartetError as error:
        assert error.reason == "INVALID_REQUEST"
        return True
    return False


def test_a_sample_has_a_flaw_where_the_trainer_refuses_it() -> None:
    """trainable.py: one that passed would end a run; one more than that would lose what can be trained on."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    flawed = 0
    for _ in range(SAMPLES):
        sample = drawn(chance)
        for _ in range(chance.randrange(3)):
            bent(sample, chance)
        supervised = bool(sample.spans) and not sample.logprobs
        told = flaw(sample)
        assert bool(told) == (supervised or refused(sample)), (told, sample)
        flawed += bool(told)
    assert SAMPLES / 5 < flawed < SAMPLES * 4 / 5, "both are looked at"


@pytest.mark.parametrize("count", [1, MANY_VALUES])
@pytest.mark.parametrize(
    "logprob", [MAX_LOGPROB * 0.99, MAX_LOGPROB, MAX_LOGPROB * 1.01, math.inf, -math.inf, math.nan]
)
def test_rounding_is_no_flaw_and_a_probability_is(logprob: float, count: int) -> None:
    """However many there are. The bound itself is no float32, and the next one is above it."""
    span = PolicySpan(start=1, length=count)
    sample = Sample(token_ids=[1] * (count + 1), logprobs=[-1.0] * (count - 1) + [logprob], spans=[span])
    assert bool(flaw(sample)) == (logprob != MAX_LOGPROB * 0.99) == refused(sample)
