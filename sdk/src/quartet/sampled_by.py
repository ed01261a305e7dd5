"""Who sampled the rollouts of a stream of RunRollouts, which says so when it changes: the members of a group
mostly have the same replica and the same weights, whose names would weigh more than a short rollout's tokens.

1. What `Told` puts into frames `Heard` takes out of them: each rollout has its own `replicas` and `weights`
   again, whatever the rollouts before it had.
2. A host of a release that tells `weights` in each rollout is heard as it told them.
"""

from __future__ import annotations

from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import rollout_pb2


class Told:
    """The host's side of one stream."""

    def __init__(self) -> None:
        self._last = epb.SampledBy()

    def frame(self, rollout: rollout_pb2.Rollout) -> epb.RunRolloutsResponse:
        """The rollout's frame."""
        frame = epb.RunRolloutsResponse(rollout=rollout)
        own = epb.SampledBy(replicas=rollout.replicas, weights=rollout.weights)
        if own != self._last:
            frame.sampled_by.CopyFrom(own)  # also where it is empty
            self._last = own
        frame.rollout.ClearField("replicas")
        frame.rollout.ClearField("weights")
        return frame


class Heard:
    """The caller's side of one stream."""

    def __init__(self) -> None:
        self._last = epb.SampledBy()

    def rollout(self, frame: epb.RunRolloutsResponse) -> rollout_pb2.Rollout:
        """That of the frame, which has one."""
        if frame.HasField("sampled_by"):
            # A copy: a part of a message holds all of it, and its rollout may have MiB.
            self._last = epb.SampledBy()
            self._last.CopyFrom(frame.sampled_by)
        frame.rollout.replicas.extend(self._last.replicas)
        frame.rollout.weights.extend(self._last.weights)
        return frame.rollout
