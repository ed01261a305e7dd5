"""How far trainer and sampler are apart, of each replica: by_replica.py."""

from __future__ import annotations

import pytest
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout, Sample
from quartet_orchestrator.by_replica import (
    FEWEST_TOKENS,
    MAX_NAMES,
    MAX_REPLICAS,
    OTHERS,
    bounded,
    differences,
)


def sampled_by(*replicas: str, samples: int = 1) -> Rollout:
    return Rollout(replicas=replicas, samples=[Sample()] * samples)


def verified(*told: tuple[float, int]) -> tpb.LogprobVerification:
    return tpb.LogprobVerification(
        sample_differences=[mean for mean, _ in told], sample_tokens=[tokens for _, tokens in told]
    )


def test_one_of_many_that_is_off_is_seen_by_its_own_tokens() -> None:
    """by_replica.py 1: over samples and mini-batches; one that two replicas sampled is no one's."""
    first = [sampled_by("a:1", samples=2), sampled_by("b:1"), sampled_by("a:1", "b:1"), sampled_by()]
    second = [sampled_by("b:1"), sampled_by("a:1")]
    parts = [
        verified((0.5, 100), (0.0, 0), (0.01, 400), (9.0, 500), (9.0, 500)),
        verified((0.03, 400), (0.75, 300)),
    ]
    found = differences(parts, [first, second])
    assert found == {"a:1": pytest.approx(0.6875), "b:1": pytest.approx(0.02)}


def test_what_is_not_known_of_each_is_not_told() -> None:
    """by_replica.py 2, and a trainer or a host of an earlier release."""
    both = [[sampled_by("a:1"), sampled_by("b:1")]]
    few = verified((0.5, FEWEST_TOKENS), (0.01, FEWEST_TOKENS - 1))
    assert differences([few], both) == {"a:1": 0.5}
    assert differences([verified((0.5, 900), (0.5, 900))], [[sampled_by("a:1")] * 2]) == {}, "the mean of all"
    assert differences([tpb.LogprobVerification(mean_difference=0.5)], both) == {}
    assert differences([few], [[sampled_by(), sampled_by()]]) == {}
    assert differences([few, tpb.LogprobVerification()], both * 2) == {}, "of one mini-batch alone"
    few.sample_tokens.pop()
    assert differences([few], both) == {}


def test_of_many_replicas_the_farthest_are_told() -> None:
    """by_replica.py 3"""
    many = range(MAX_REPLICAS + 4)
    rollouts = [sampled_by(f"r{number}:1") for number in many]
    found = differences([verified(*((number / 64, 100) for number in many))], [rollouts])
    assert list(found) == [f"r{number}:1" for number in reversed(many)][:MAX_REPLICAS]


def test_a_run_has_so_many_names_of_replicas_and_what_is_off_beyond_them_is_seen() -> None:
    """by_replica.py 3: pods that come anew have other addresses."""
    told: frozenset[str] = frozenset()
    for day in range(MAX_NAMES):
        told |= bounded({f"{day}.0:1": 0.2, f"{day}.1:1": 0.1}, told).keys() - {OTHERS}
    assert len(told) == MAX_NAMES and {"0.1:1", "31.1:1"} <= told
    found = {"new:1": 0.9, "0.0:1": 0.3, "newer:1": 0.2}
    assert bounded(found, told) == {OTHERS: 0.9, "0.0:1": 0.3}
