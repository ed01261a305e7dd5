"""Fetching an exported model into a folder: verified, resumed where the stream tore, bounded in tries.

1. The target is there whole or not at all: it is written beside its place, and renamed once every file has
   its size and digest. What exists and is not empty is not touched.
2. A stream that tears goes on from the first byte that is missing, for as long as something comes;
   PATIENCE bounds the tries in a row that bring nothing, FIRST those before there is a manifest.
3. What no waiting mends ends it at once: a refusal, a model that was replaced meanwhile, a harmed one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from quartet.errors import QuartetError, refused
from quartet.exported.arriving import Arriving
from quartet.kit.call import RetryBudget, stream
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.v1 import model_pb2 as pb

#: A trainer that was killed is back after a minute or two: it imports torch, perhaps on another machine.
PATIENCE = RetryBudget(max_attempts=60, initial_backoff_s=0.2, max_backoff_s=8.0)
#: Nobody is there, or not yet.
FIRST = RetryBudget()
#: Signs of life in a row from a trainer that waits for its disk; one comes every five seconds.
MAX_SIGNS = 120
#: What another try may mend.
PASSING = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE", "INTERNAL"})


class Told(Protocol):
    """Whoever wants to know how it goes."""

    def begins(self, manifest: pb.ModelManifest) -> None:
        """What comes is known."""

    def tore(self, why: QuartetError, place: pb.ModelPlace) -> None:
        """The stream broke off; it goes on from there."""


async def fetch_model(begin: Callable[[pb.ModelPlace | None], Any], target: Path, told: Told) -> None:
    """Write a model's folder. `begin` calls FetchModel or FetchRunModel, from a place on.

    Errors: INVALID_REQUEST (the target), those of the call, CHECKSUM_MISMATCH, OSError (the target's disk).
    """
    with _taking_place(target) as folder:
        arriving = Arriving(folder)
        try:
            await _arrive(begin, arriving, told)
        finally:
            arriving.close()


@contextmanager
def _taking_place(target: Path) -> Iterator[Path]:
    """A folder to be made beside the target, whose place it then takes. Errors: INVALID_REQUEST."""
    target = target.absolute()
    if _is_taken(target):
        raise refused("target", target, "it exists and is no empty folder; name one that does not")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as writing:
        try:
            yield (written := Path(writing) / "model")
        except OSError as error:
            error.filename = str(target)  # what was written has another name, or none, and goes
            raise
        try:
            written.rename(target)
        except OSError as error:
            if not _is_taken(target):
                raise
            raise refused("target", target, "it was written meanwhile; name another folder") from error


def _is_taken(target: Path) -> bool:
    """Whether something is in the way; an empty folder is not."""
    return os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir()))


async def _arrive(begin: Callable[[pb.ModelPlace | None], Any], arriving: Arriving, told: Told) -> None:
    barren = 0
    while not arriving.complete:
        before = arriving.place
        try:
            await _receive(begin(before), arriving, told)
            if not arriving.complete:
                raise QuartetError("NOT_READY", "the stream ended before the model did")
        except QuartetError as error:
            place = arriving.place
            barren = barren + 1 if place == before else 0
            budget = FIRST if place is None else PATIENCE
            if error.reason not in PASSING or barren >= budget.max_attempts:
                raise
            if place is not None:
                told.tore(error, place)
            await asyncio.sleep(budget.delay_s(barren + 1, error))


async def _receive(call: Any, arriving: Arriving, told: Told) -> None:
    """One stream, for as long as it brings what is missing."""
    signs = 0
    try:
        async for frame in stream(call, idle_timeout_s=IDLE_TIMEOUT_SECONDS):
            signs = signs + 1 if frame.HasField("heartbeat") else 0
            if signs > MAX_SIGNS:
                raise QuartetError("DEADLINE", f"{signs} signs of life, and no byte", waited_for="chunk")
            match frame.WhichOneof("frame"):
                case "manifest":
                    is_first = arriving.manifest is None
                    await asyncio.to_thread(arriving.begin, frame.manifest)
                    if is_first:
                        told.begins(frame.manifest)
                case "chunk":
                    await asyncio.to_thread(arriving.accept, frame.chunk)
    finally:
        call.cancel()
