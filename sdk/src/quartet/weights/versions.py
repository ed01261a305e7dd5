"""A version that is held, and the versions of one run.

1. Of a run the versions published last are held; a version that is published again counts as published last.
2. The history of a run reaches as far back as a chain of deltas may begin.
3. Not thread-safe: whoever owns a Run holds a lock. A Version never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights.payload import Payload
from quartet.weights.tensor import Tensor

#: Links of the longest chain of deltas: a reader that is further behind is anchored by a full payload.
ANCHOR_EVERY = 25

#: Number and digest of a version that a reader holds.
Base = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Version:
    """One version that is held."""

    manifest: pb.WeightManifest
    tensors: Mapping[str, Tensor]
    payload: Payload
    #: Which opening of the run it belongs to: numbers of a run that was closed and opened again start anew.
    generation: int

    @property
    def run_id(self) -> str:
        """The run."""
        return str(self.manifest.run_id)

    @property
    def number(self) -> int:
        """The version's number."""
        return int(self.manifest.version)

    def announced(self) -> pb.VersionAnnounced:
        """What Watch says of it."""
        return pb.VersionAnnounced(run_id=self.run_id, version=self.number, digest=self.manifest.digest)


@dataclass(slots=True, eq=False)
class Run:
    """The versions of one opening of a run."""

    generation: int
    #: Somebody made it known, and will close it; the others came with a version.
    opened: bool = False
    #: Its versions are adapters; not known of one that was opened before its first.
    adapters: bool = False
    #: When it got its last version: larger is later.
    taken: int = 0
    #: In the order of publishing.
    versions: dict[int, Version] = field(default_factory=dict)
    #: The numbers published last, in that order, with those that deltas led over on the way to one.
    history: list[int] = field(default_factory=list)

    @property
    def latest(self) -> Version | None:
        """The version with the highest number."""
        return self.versions[max(self.versions)] if self.versions else None

    def take(self, version: Version, keep: int, over: Sequence[int] = ()) -> None:
        """Hold a version as the one published last, and so many in all; deltas led to it `over` these."""
        self.versions.pop(version.number, None)
        self.versions[version.number] = version
        while len(self.versions) > keep:
            del self.versions[next(iter(self.versions))]
        last = [*over, version.number]
        self.history = [*(number for number in self.history if number not in last), *last]
        del self.history[: -ANCHOR_EVERY - 1]


def check_same(held: pb.WeightManifest, made: pb.WeightManifest) -> None:
    """Refuse other weights under a number that is held. Errors: SEQUENCE_CONFLICT."""
    if held.digest != made.digest:
        raise QuartetError(
            "SEQUENCE_CONFLICT",
            f"version {held.version} of run {held.run_id} is held with other weights; versions are immutable",
            held_digest=held.digest.hex(),
            wanted_digest=made.digest.hex(),
        )
