"""Who sampled the rollouts of a stream, told when it changes (sampled_by.py)."""

from __future__ import annotations

import random

from quartet.sampled_by import Heard, Told
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1.rollout_pb2 import PolicyWeights, Rollout

WEIGHTS = [PolicyWeights(policy_version=version, weights_id=1 << 63 | version) for version in (3, 4)]


def test_each_rollout_has_its_own_again() -> None:
    """sampled_by.py 1, whatever follows on what."""
    chance = random.Random(7)
    print("seed 7")
    replicas, weights = [[], ["a:1"], ["b:1"], ["a:1", "b:1"]], [[], WEIGHTS[:1], WEIGHTS[1:], WEIGHTS]
    rollouts = [
        Rollout(member=member, replicas=chance.choice(replicas), weights=chance.choice(weights))
        for member in range(200)
    ]
    told, heard = Told(), Heard()
    for rollout in rollouts:
        frame = epb.RunRolloutsResponse.FromString(told.frame(rollout).SerializeToString())
        assert not frame.rollout.replicas and not frame.rollout.weights
        assert heard.rollout(frame) == rollout


def test_nothing_of_a_frame_is_held_for_the_next() -> None:
    """A part of a message holds all of it: a stream that is open would hold a rollout of MiB."""
    heard = Heard()
    frame = epb.RunRolloutsResponse(rollout={"member": 1}, sampled_by={"replicas": ["a:1"]})
    heard.rollout(frame)
    frame.sampled_by.replicas[:] = ["another"]
    assert heard.rollout(epb.RunRolloutsResponse(rollout={"member": 2})).replicas == ["a:1"]


def test_what_stays_is_told_once() -> None:
    told = Told()
    frames = [told.frame(Rollout(replicas=["a:1"], weights=WEIGHTS)) for _ in range(3)]
    assert [frame.HasField("sampled_by") for frame in frames] == [True, False, False]
    assert not Told().frame(Rollout(member=1)).HasField("sampled_by")


def test_weights_of_a_host_that_tells_them_in_each_rollout_stay() -> None:
    """sampled_by.py 2."""
    heard = Heard()
    for at in (0, 1, 1):
        rollout = Rollout(weights=[WEIGHTS[at]])
        assert heard.rollout(epb.RunRolloutsResponse(rollout=rollout)) == rollout
