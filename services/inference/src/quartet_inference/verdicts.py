"""What became of the adapters, by run: which are served, which are not, and which are behind, and why.

1. An adapter is told as served from the moment on that a canary of it lives; one whose canary died is told
   with the reason until another of its run lives, or it is unloaded. So nobody takes what is loaded again, to
   be scored again, for an adapter that answers.
2. The reason says what to do. The likeliest cause is a replica that serves another model than the one that
   the adapter belongs to: adapters fit every model of that shape. An adapter as it begins changes nothing, so
   its canary is that of the run's model alone, and there it is the only cause but damage. Two of one path are
   not told to be two models: where the run's was rounded and the replica's is not, that is the cause.
3. One that is served while a newer version of its run could not be taken is told with the reason, until one
   was, or it is served no more; to its own run and to no other. So is one that could not be loaded, for
   REFUSED_SECONDS: whoever wants it then finds out again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from quartet.inference import UpdateRefusal, refusal
from quartet.v1 import weights_pb2 as pb
from quartet.weights.tensor import Tensor

from quartet_inference.canary import NAMES
from quartet_inference.engine import EngineInfo

#: Of dead adapters, of which each has a sentence or two: the oldest is forgotten first.
MAX_DEAD = 64
#: Longer than a run's steps, each of which has it loaded anew where it is not served.
REFUSED_SECONDS = 300.0
#: As peft names the second matrix: zero at the beginning.
SECOND = ".lora_B.weight"


class Verdicts:
    """Of one replica's adapters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was scored yet."""
        self._clock = clock
        self._living: set[str] = set()
        self._dead: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        # Why, and when; the oldest comes first.
        self._refused: dict[str, tuple[str, float]] = {}

    def lives(self, run_id: str) -> None:
        """The canary of a run's adapter was right."""
        self._dead.pop(run_id, None)
        self._refused.pop(run_id, None)
        self._living.add(run_id)

    def refused(self, run_id: str, why: str) -> None:
        """A run's adapter could not be loaded."""
        self._refused.pop(run_id, None)
        while len(self._refused) >= MAX_DEAD:
            del self._refused[next(iter(self._refused))]
        self._refused[run_id] = (why, self._clock())

    def died(self, run_id: str, why: str) -> None:
        """It was wrong."""
        self.ended(run_id)
        self._dead.pop(run_id, None)
        while len(self._dead) >= MAX_DEAD:
            del self._dead[next(iter(self._dead))]
        self._dead[run_id] = why

    def ended(self, run_id: str) -> None:
        """The adapter is not in the engine any more."""
        self._living.discard(run_id)
        self._behind.pop(run_id, None)

    def fell_behind(self, run_id: str, why: UpdateRefusal) -> None:
        """What was offered last of a run whose adapter is served could not be taken.

        What is about all of them is told by whoever follows the replica's run, for as long as it is so.
        """
        if why.run_id:
            self._behind[run_id] = why.why

    def caught_up(self, run_id: str) -> None:
        """It is served."""
        self._behind.pop(run_id, None)

    def forget(self, run_id: str) -> None:
        """Somebody unloads it."""
        self.ended(run_id)
        self._dead.pop(run_id, None)
        self._refused.pop(run_id, None)

    def living(self, run_id: str) -> bool:
        """Whether a canary of what is loaded lived."""
        return run_id in self._living

    def behind(self, run_id: str) -> str:
        """Why a run's adapter is not the newest, or not served; empty where it is, or where nobody knows."""
        return self._not_taken().get(run_id, "")

    @property
    def all_behind(self) -> list[UpdateRefusal]:
        """The same of all of them."""
        return [refusal(why, run_id) for run_id, why in self._not_taken().items()]

    def _not_taken(self) -> dict[str, str]:
        since = self._clock() - REFUSED_SECONDS
        told = {run_id: why for run_id, (why, at) in self._refused.items() if at > since}
        return {**told, **self._behind}

    @property
    def dead(self) -> Mapping[str, str]:
        """Why the adapter of a run is not served, by run."""
        return self._dead


def diagnosis(
    manifest: pb.WeightManifest, tensors: Mapping[str, Tensor], folder: Path, engine: EngineInfo
) -> str:
    """What it means where the canary of this adapter dies upon the model of this folder, and what to do."""
    if not manifest.HasField("canary"):
        return "let its publisher publish it again"
    of = json.loads(manifest.adapter_config).get("base_model_name_or_path") or "unnamed"
    # Its publisher's name for it: of a user who is not there it stays as it is.
    is_same_path = Path(os.path.expanduser(of)).resolve() == folder.expanduser().resolve()
    published = {NAMES[one.dtype] for one in tensors.values() if one.dtype in NAMES}
    # What is wider than the replica's is no cause: the tolerance is the replica's.
    if published and not published & {"float32", engine.dtype}:
        (*_, rounded) = sorted(published)
        cause = (
            f"the run's base ({of!r}) was rounded to {rounded}, as the run's served_dtype (without it its "
            f"compute_dtype) says, and the replica's ({str(folder)!r}) is {engine.dtype}; give the run "
            f'served_dtype = "{engine.dtype}", or the replica {engine.name}.dtype = "{rounded}"'
        )
        return cause if is_same_path else f"{cause}, and the run's model where that is another one"
    cause = f"the replica's base ({str(folder)!r}) is another model than the run's ({of!r})"
    if is_same_path:
        cause = f"the replica's base, read from {str(folder)!r} as the run's, has other weights than that"
    if any(np.frombuffer(one.data, np.uint8).any() for name, one in tensors.items() if name.endswith(SECOND)):
        cause += ", or what is in the engine is damaged"
    return f"{cause}; start the replica with the run's model, or submit a run of the replica's"
