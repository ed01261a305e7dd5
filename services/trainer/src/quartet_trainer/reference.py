"""The reference model of a run: what the policy must not leave too far behind, or what it learns from.

1. Frozen, it is the base model as it was loaded, or another model that the spec names (a teacher). Neither is
   written into states: CreateRun loads both again. Their digest is, so that no run goes on beside another
   reference than it began with. (That of an adapter's base is the adapter's: lora.py 5.)
2. Synchronised, it moves every `sync_steps` optimizer steps: reference = alpha * policy + (1 - alpha) *
   reference. (TR-DPO, arXiv 2404.09656; TRL's ref_model_sync_steps and ref_model_mixup_alpha.) Then it
   belongs to the run's state, and a restored run continues bit-equally.
3. It is told no experts: what it thinks of a token is its own routers' matter (replay.py).
4. It computes in the arithmetic of the policy's own pass: where weights are equal, so are log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from quartet.errors import QuartetError
from torch import Tensor, nn

from quartet_trainer.frozen import digest_of
from quartet_trainer.passes import Passes
from quartet_trainer.ranks.layout import part
from quartet_trainer.sample import Floats, Sample
from quartet_trainer.spec import ReferenceSpec

#: Its file in a state, and what a state says of it.
REFERENCE, DIGEST = "reference", "reference_digest"

#: Log-probabilities of the covered positions of each sample, at a temperature.
Scorer = Callable[[Sequence[Sample], float], list[Floats]]


class Reference:
    """A model beside the policy. `score` says how it computes; `weights` are what a synchronisation moves."""

    def __init__(
        self, spec: ReferenceSpec, score: Scorer, weights: Mapping[str, Tensor], digest: str | None
    ) -> None:
        """The `digest` is of what no state holds, made while all ranks are here."""
        self._spec, self._score, self._weights, self._digest = spec, score, weights, digest

    @classmethod
    def of_policy(
        cls,
        spec: ReferenceSpec,
        passes: Passes,
        parameters: Mapping[str, nn.Parameter],
        progress: Callable[[], None],
    ) -> Reference:
        """A copy of the policy as it stands now."""
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

        def score(samples: Sequence[Sample], temperature: float) -> list[Floats]:
            return passes.score(samples, weights, temperature, full_precision=False)

        return cls(spec, score, weights, None if spec.sync_steps else digest_of(weights, progress))

    @classmethod
    def of_model(
        cls,
        spec: ReferenceSpec,
        passes: Passes,
        parameters: Mapping[str, nn.Parameter],
        progress: Callable[[], None],
    ) -> Reference:
        """Another model, with passes of its own; of these parameters, none for the base of an adapter."""

        def score(samples: Sequence[Sample], temperature: float) -> list[Floats]:
            # The policy may have more tokens, and take longer sequences.
            passes.check(samples, "the reference model")
            return passes.score(samples, None, temperature)

        return cls(spec, score, {}, digest_of(parameters, progress) if parameters else None)

    def score(self, samples: Sequence[Sample], temperature: float) -> list[Floats]:
        """Log-probabilities of the covered positions of each sample. Errors: INVALID_REQUEST."""
        return self._score([replace(sample, experts_TNk=None) for sample in samples], temperature)

    def stepped(self, steps: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """The policy has taken so many optimizer steps."""
        if not self._spec.sync_steps or steps % self._spec.sync_steps:
            return
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.lerp_(parameters[name], self._spec.share)

    def tensors(self) -> Mapping[str, Tensor]:
        """What a state keeps."""
        return self._weights if self._spec.sync_steps else {}

    def meta(self) -> dict[str, Any]:
        """What a state says of it."""
        return {DIGEST: self._digest}

    def check(self, meta: Mapping[str, Any]) -> None:
        """Whether it is the one of a state; releases before this one said nothing of it. Errors:
        CHECKSUM_MISMATCH."""
        if meta.get(DIGEST) not in (None, self._digest):
            key = "reference.model" if self._spec.model else "base_model"
            raise QuartetError(
                "CHECKSUM_MISMATCH",
                f"the state is of a run whose reference had other weights than {key} has now; nothing was "
                "loaded. Put back what was there, or begin another run with the model of this state",
                what=key,
            )

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what a state kept."""
        for name, tensor in tensors.items():
            part(self._weights[name]).copy_(part(tensor))
