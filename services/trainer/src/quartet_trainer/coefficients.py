"""The coefficients of a loss that follow what is measured: of the divergence, and of the entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet_trainer.entropy_control import EntropyControl
from quartet_trainer.kl_control import KlControl
from quartet_trainer.spec import LossSpec

#: What a state has of them, by name.
KL, ENTROPY = "kl_control", "entropy_control"


class Coefficients:
    """Those of a run."""

    def __init__(self) -> None:
        """As the losses say them."""
        self._kl, self._entropy = KlControl(), EntropyControl()

    def adapted(self, loss: LossSpec) -> LossSpec:
        """The loss with the coefficients to use."""
        used = {"kl_coef": self._kl.of(loss), "entropy_coef": self._entropy.of(loss)}
        return loss.model_copy(update=used)

    def observe(self, loss: LossSpec, values: Mapping[str, float], tokens: int) -> dict[str, float]:
        """A batch of so many covered tokens was applied, of which this is reported. What is to be reported of
        the coefficients that it used."""
        used = self.adapted(loss)
        reported: dict[str, float] = {}
        if loss.kl_coef:
            reported["kl_coef"] = used.kl_coef
            self._kl.observe(loss, values["reference_kl"], tokens)
        if loss.target_entropy is not None:
            reported["entropy_coef"] = used.entropy_coef
            self._entropy.observe(loss, values["entropy"], tokens)
        return reported

    def step(self, taken: bool) -> None:
        """An optimizer step was taken, or skipped."""
        self._kl.step(taken)
        self._entropy.step(taken)

    def meta(self) -> dict[str, Any]:
        """What a state keeps."""
        return {KL: self._kl.meta(), ENTROPY: self._entropy.meta()}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Stand where a state was taken; releases before this one kept none of the entropy."""
        self._kl.restore(meta[KL])
        self._entropy = EntropyControl.of_meta(meta.get(ENTROPY, {}))
