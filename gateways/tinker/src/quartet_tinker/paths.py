"""tinker:// paths: states and samplers by name.

tinker://ORIGIN/weights/NAME is the state NAME of the run that was created for the model ORIGIN.
tinker://ORIGIN/sampler_weights/NAME@VERSION-DIGEST is a version of that run: all that is needed to sample
from it is in the path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quartet_tinker.refusal import Refused

_NAME = r"[\w.-]{1,64}"
_PATH = re.compile(
    rf"tinker://([\w.:-]{{1,64}})/(weights|sampler_weights)/({_NAME})(?:@(\d{{1,18}})-([0-9a-f]{{12}}))?"
)
#: Hex digits of a digest in a path.
DIGITS = 12


@dataclass(frozen=True)
class WeightsPath:
    """A path, read."""

    origin: str
    name: str
    # Of a sampler; None of a state.
    version: int | None
    digest: str

    @property
    def run_id(self) -> str:
        """The run on the trainer."""
        return run_id(self.origin)


def run_id(model_id: str) -> str:
    """The run that is created for a model."""
    return model_id.replace(":", ".")


def check_name(name: str) -> None:
    """Whether weights can be called so. Raises Refused."""
    if re.fullmatch(_NAME, name) is None:
        raise Refused(f"path = {name!r} is refused; give 1 to 64 letters, digits, '_', '.' and '-'")


def read(path: str) -> WeightsPath:
    """Read a path. Raises Refused."""
    found = _PATH.fullmatch(path)
    if found is None or (found[2] == "sampler_weights") != (found[4] is not None):
        raise Refused(
            f"path = {path!r} is none of this gateway; give what save_state or "
            "save_weights_for_sampler returned"
        )
    return WeightsPath(found[1], found[3], int(found[4]) if found[4] else None, found[5] or "")
