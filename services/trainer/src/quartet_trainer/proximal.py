"""The proximal policy of a batch that takes several optimizer steps: what the first of them began with.

1. Where a loss says that another step with the same proximal version follows (`proximal_returns`), the step
   that leaves this version keeps its masters. Later steps score under them in the arithmetic of the policy's
   own pass, so that where weights are equal, so are log-probabilities: what was published of them may have
   lost digits, and clips of a sequence's ratio (GSPO's 3e-4) are narrower than these.
2. They are kept until a step of which no loss said so, in states, too: a restored run continues bit-equally.
   It is one more copy of what is trained; where what was published has all digits, it is that one.
3. Of a caller that does not say so nothing is kept, and its proximal policy is a version as it was published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quartet_trainer.ranks.layout import part
from quartet_trainer.spec import LossSpec

#: Its file in a state, and what a state says of it.
PROXIMAL = "proximal"


class Proximal:
    """Of one run."""

    def __init__(self) -> None:
        """There is none."""
        # Of the batches since the last step: the version that is asked for again.
        self._returns: int | None = None
        self._version: int | None = None
        self._masters: Mapping[str, Tensor] = {}

    def find(self, version: int) -> Mapping[str, Tensor] | None:
        """The masters of a version, if they are kept."""
        return self._masters if version == self._version else None

    def observe(self, loss: LossSpec) -> None:
        """A batch with this loss was applied."""
        if loss.proximal_returns:
            self._returns = loss.proximal_version

    def stepping(
        self, version: int, parameters: Mapping[str, nn.Parameter], published: Mapping[str, Tensor] | None
    ) -> None:
        """A step leaves a version. `published`: what is published of it, where that has all digits."""
        if self._returns == version:
            masters = published or {name: one.detach().clone() for name, one in parameters.items()}
            self._version, self._masters = version, masters
        elif self._returns is None or self._returns != self._version:
            self._version, self._masters = None, {}
        self._returns = None

    def meta(self) -> dict[str, Any]:
        """What a state says of it."""
        return {PROXIMAL: {"version": self._version, "returns": self._returns}}

    def tensors(self) -> Mapping[str, Tensor]:
        """What a state keeps."""
        return self._masters

    def restore(
        self,
        meta: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Stand where a state was taken; releases before this one kept none."""
        said = meta.get(PROXIMAL, {})
        self._returns, self._version = said.get("returns"), said.get("version")
        self._masters = {name: parameters[name].detach().clone() for name in tensors}
        for name, tensor in tensors.items():
            part(self._masters[name]).copy_(part(tensor))
