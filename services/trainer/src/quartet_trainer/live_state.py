"""The state of a run as it stands in memory: all that its future depends on.

1. `content` holds all of it, accumulated gradients and retained versions included; a run that stands where
   that was taken continues bit-equally.
2. What does not fit is refused before anything changes.
3. What fails while it changes tears it: from then on it is no state of the run any more, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from quartet_trainer.beginning import STEPS_BEFORE, beginning, optimizer_steps
from quartet_trainer.coefficients import Coefficients
from quartet_trainer.content import GRADIENTS, MOMENTS, WEIGHTS, Content
from quartet_trainer.gradients import Gradients
from quartet_trainer.optimizer import Optimizer
from quartet_trainer.proximal import PROXIMAL, Proximal
from quartet_trainer.ranks.layout import part
from quartet_trainer.reference import REFERENCE, Reference
from quartet_trainer.spec import RunSpec
from quartet_trainer.trained import Trained, check_weights
from quartet_trainer.versions import Versions


@dataclass(slots=True)
class LiveState:
    """What one run consists of. For the thread that computes it."""

    run_id: str
    spec: RunSpec
    trained: Trained
    reference: Reference | None
    gradients: Gradients
    optimizer: Optimizer
    versions: Versions
    #: What versions are published in: of a restored run what it was when the state was taken.
    served_dtype: str
    coefficients: Coefficients = field(default_factory=Coefficients)
    proximal: Proximal = field(default_factory=Proximal)
    #: Optimizer steps, skipped ones included.
    policy_version: int = 0
    skipped_steps: int = 0
    #: Of the optimizer, where the run began with the state of another one.
    steps_before: int = 0
    #: Whether a loss among the accumulated batches was not finite; their gradients may look sound.
    loss_broken: bool = False
    #: Whether a change failed half way.
    is_torn: bool = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What fails in here tears the state: parameters, moments and reference change in place."""
        self.is_torn = True
        yield
        self.is_torn = False

    def content(self, applied_seq_id: int) -> Content:
        """All of it, to be saved."""
        meta = {
            "run_id": self.run_id,
            "spec": self.spec.model_dump(mode="json"),
            "applied_seq_id": applied_seq_id,
            "policy_version": self.policy_version,
            "skipped_steps": self.skipped_steps,
            STEPS_BEFORE: self.steps_before,
            "loss_broken": self.loss_broken,
            **self.coefficients.meta(),
            **self.proximal.meta(),
            "served_dtype": self.served_dtype,
            "trained": self.trained.meta(),
            **({} if self.reference is None else self.reference.meta()),
            **self.versions.meta(),
        }
        tensors = {
            WEIGHTS: {name: parameter.detach() for name, parameter in self.trained.parameters.items()},
            MOMENTS: self.optimizer.moments(),
            GRADIENTS: self.gradients.taken(),
            REFERENCE: {} if self.reference is None else self.reference.tensors(),
            PROXIMAL: self.proximal.tensors(),
            **self.versions.tensors(self.policy_version),
        }
        return Content(meta, {stem: named for stem, named in tensors.items() if named})

    def begin(self, content: Content) -> None:
        """Begin with another run's state, or with an adapter. Errors: INVALID_CONFIG, CHECKSUM_MISMATCH."""
        self.restore(beginning(self.spec, content, self.trained, self.served_dtype))

    def restore(self, content: Content) -> None:
        """Stand where the content was taken, with the version published last and those retained before it.

        Every other version is forgotten. Errors: CHECKSUM_MISMATCH, INVALID_CONFIG, which change nothing.
        """
        weights, meta = content.tensors[WEIGHTS], content.meta
        policy_version, skipped = int(meta["policy_version"]), int(meta["skipped_steps"])
        # What was served when the state was taken, on whatever device that was.
        served_dtype = str(meta["served_dtype"])
        self.trained.check(meta["trained"])
        if self.reference is not None:
            self.reference.check(meta)
        check_weights(self.trained.parameters, weights)
        self.optimizer.check(content.tensors.get(MOMENTS, {}))
        live = self.trained.published(weights, served_dtype)
        kept = self.versions.read(meta, content.tensors, policy_version, live)
        with self.changing():
            # Before anything is published: its canary is computed as this type is.
            self.served_dtype = served_dtype
            self.versions.restore(meta, kept)
            with torch.no_grad():
                for name, parameter in self.trained.parameters.items():
                    part(parameter).copy_(part(weights[name]))
            self.trained.restore(meta["trained"])
            self.gradients.restore(content.tensors.get(GRADIENTS, {}))
            self.optimizer.restore(content.tensors.get(MOMENTS, {}), optimizer_steps(meta))
            if self.reference is not None:
                self.reference.restore(content.tensors.get(REFERENCE, {}))
            self.coefficients.restore(meta)
            self.proximal.restore(meta, content.tensors.get(PROXIMAL, {}), self.trained.parameters)
            self.policy_version, self.skipped_steps = policy_version, skipped
            self.steps_before = int(meta.get(STEPS_BEFORE, 0))
            self.loss_broken = bool(meta["loss_broken"])

    def close(self) -> None:
        """Withdraw what was published, and let go of what takes memory. It must not be used any more."""
        self.versions.close()
        self.trained.close()
        # Whoever still holds this object, a call that tore it among them, holds no memory by it.
        del self.trained, self.reference, self.gradients, self.optimizer, self.proximal
