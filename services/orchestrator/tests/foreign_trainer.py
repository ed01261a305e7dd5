"""A foreign trainer, as small as one can be: what it has trained on is its disk, and survives its deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.kit.call import stream
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator.foreign import ForeignTraining

RUN = "run"


def when_called(monkeypatch, name: str) -> asyncio.Event:
    """Set when a run calls this method of what hands its batches out."""
    called, method = asyncio.Event(), getattr(ForeignTraining, name)

    def noted(self, *arguments):
        called.set()
        return method(self, *arguments)

    monkeypatch.setattr(ForeignTraining, name, noted)
    return called


@dataclass
class Taken:
    """A group as it came."""

    head: pb.CreditedGroup
    rollouts: list[Rollout] = field(default_factory=list)
    advantages: list[list[float]] = field(default_factory=list)


@dataclass
class ForeignTrainer:
    #: Makes a version served.
    push: Callable[[int], None]
    #: Before each group that it would acknowledge; raises where the trainer dies.
    about_to_ack: Callable[[Taken], None] = lambda taken: None
    credits: int = 2
    #: On its disk: the groups of the step under way, how often each group came, the version.
    step: dict[int, Taken] = field(default_factory=dict)
    came: Counter[int] = field(default_factory=Counter)
    trained: list[Taken] = field(default_factory=list)
    version: int = 0

    async def live(self, stub, run_id: str = RUN) -> None:
        """Until the run is over, or an error. Raises QuartetError."""
        said: asyncio.Queue[pb.StreamRolloutsRequest] = asyncio.Queue()

        async def says():
            while True:
                yield await said.get()

        self.push(self.version)
        said.put_nowait(pb.StreamRolloutsRequest(start=pb.StreamRolloutsStart(run_id=run_id)))
        said.put_nowait(pb.StreamRolloutsRequest(credits=self.credits))
        coming: Taken | None = None
        async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=20, sends=True):
            match frame.WhichOneof("frame"):
                case "group":
                    assert coming is None
                    coming = Taken(frame.group)
                case "rollout":
                    coming.rollouts.append(frame.rollout.rollout)
                    coming.advantages.append(list(frame.rollout.advantages))
            if coming is not None and len(coming.rollouts) == coming.head.rollouts:
                done, coming = coming, None
                self._take(done)
                self.about_to_ack(done)
                said.put_nowait(pb.StreamRolloutsRequest(ack=done.head.group))
                said.put_nowait(pb.StreamRolloutsRequest(credits=1))

    def _take(self, group: Taken) -> None:
        self.came[group.head.group] += 1
        if group.head.step <= self.version:
            return  # trained on, and the acknowledgement was lost
        assert group.head.step == self.version + 1
        self.step[group.head.group] = group
        if len(self.step) == group.head.groups_of_step:
            self.trained += self.step.values()
            self.step.clear()
            self.version += 1
            self.push(self.version)
