"""A payload on its way in, for those who already read what has come: how a relay passes a version on early.

1. Readers see a prefix of the payload, and only bytes whose chunks passed their checksums.
2. `end` is known only after the whole version was verified: nobody downstream can hold it earlier.
3. An arrival ends once: whole, or torn. Whoever waits is woken either way.

For one event loop.
"""

from __future__ import annotations

import asyncio

from quartet.v1 import weights_pb2 as pb


class Arrival:
    """One fetch under way."""

    def __init__(self) -> None:
        self.manifest: pb.WeightManifest | None = None
        self.buffer = memoryview(b"")
        #: Bytes from the start that are there and checked.
        self.verified = 0
        #: Closes the payload; None until the version is verified whole.
        self.end: pb.WeightEnd | None = None
        self.torn = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.torn or self.end is not None

    def begin(self, manifest: pb.WeightManifest, buffer: memoryview) -> None:
        """The manifest is there, and this is where the payload will stand."""
        self.manifest, self.buffer = manifest, buffer.toreadonly()
        self._wake()

    def advance(self, verified: int) -> None:
        """So many bytes from the start are there and checked."""
        if verified > self.verified:
            self.verified = verified
            self._wake()

    def finish(self, end: pb.WeightEnd) -> None:
        """Every byte, tensor and digest was verified."""
        self.verified, self.end = len(self.buffer), end
        self._wake()

    def tear(self) -> None:
        """The fetch was given up. Without effect after `finish`."""
        if self.end is None:
            self.torn = True
        self._wake()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False when none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
