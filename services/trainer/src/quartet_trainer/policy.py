"""The policy of a run: its model, what of it learns, how it computes, and the reference beside it.

1. A policy that cannot be made leaves nothing of itself in a base that others share.
2. The reference of an adapter is the same model with the adapter off, unless it is synchronised or another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet_trainer.bases import Bases
from quartet_trainer.machine import Machine
from quartet_trainer.passes import Passes, Standing
from quartet_trainer.placement import frozen, placed
from quartet_trainer.publish import TORCH_DTYPES
from quartet_trainer.recompute import NOTHING, Recomputed, recomputable
from quartet_trainer.reference import Reference
from quartet_trainer.routing import freeze_routers
from quartet_trainer.spec import RunSpec
from quartet_trainer.trained import Trained, WholeModel, replaced


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run computes with."""

    #: Of the base model.
    folder: Path
    compute_dtype: str
    trained: Trained
    passes: Passes
    reference: Reference | None


def make_policy(spec: RunSpec, machine: Machine, progress: Callable[[], None], bases: Bases) -> Policy:
    """Load or initialise the base model, unless it is in `bases`. Errors: INVALID_CONFIG."""
    return _Making(spec, machine, progress, bases).policy()


class _Making:
    """What its parts are made of."""

    def __init__(self, spec: RunSpec, machine: Machine, progress: Callable[[], None], bases: Bases) -> None:
        self._spec, self._machine, self._progress, self._bases = spec, machine, progress, bases
        self._folder = machine.folder_of(spec.base_model, progress)
        default_dtype = "bfloat16" if machine.device.type == "cuda" else "float32"
        self._compute_dtype = spec.compute_dtype or default_dtype
        self._autocast = None if self._compute_dtype == "float32" else TORCH_DTYPES[self._compute_dtype]

    def policy(self) -> Policy:
        """All of it."""
        trained, bare = self._trained()
        try:
            passes = self._passes(trained.model, trained.standing, self._recomputed(trained.model))
            reference = self._reference(trained, passes, bare)
        except BaseException:
            trained.close()
            raise
        return Policy(self._folder, self._compute_dtype, trained, passes, reference)

    def _trained(self) -> tuple[Trained, Standing | None]:
        """What learns; and of an adapter, how its model stands as its base."""
        spec = self._spec
        if spec.lora is None:
            model = self._load()
            if spec.freeze_routers:
                freeze_routers(model, spec.base_model)
            return WholeModel(model), None
        shared = self._bases.open(self._folder, spec, self._load, self._autocast)
        adapter = shared.join(spec.lora, spec.base_model, spec.seed)
        return adapter, adapter.bare

    def _load(self) -> Any:
        """The base model, which computes rightly here."""
        seed = self._spec.seed if self._spec.from_scratch else None
        return placed(self._machine, self._folder, self._spec.base_model, self._autocast, seed)

    def _recomputed(self, model: Any) -> Recomputed:
        recompute = self._spec.gradient_checkpointing or self._machine.gradient_checkpointing
        layers = recomputable(model, self._spec.base_model) if recompute else ()
        return Recomputed(layers, self._machine.keep_attention)

    def _passes(self, model: Any, standing: Standing = replaced, recomputed: Recomputed = NOTHING) -> Passes:
        machine = self._machine
        budget_tokens = self._spec.microbatch_tokens or machine.microbatch_tokens
        forward = machine.ranks.policy(model, machine.device, self._autocast, recomputed)
        return Passes(forward, machine, budget_tokens, self._progress, standing)

    def _reference(self, trained: Trained, passes: Passes, bare: Standing | None) -> Reference | None:
        spec = self._spec.reference
        if spec is None:
            return None
        if not spec.model and bare is not None and not spec.sync_steps:
            return Reference.of_model(spec, self._passes(trained.model, bare), {}, self._progress)
        if not spec.model:
            return Reference.of_policy(spec, passes, trained.parameters, self._progress)
        model = frozen(self._machine, spec.model, self._autocast, self._progress)
        return Reference.of_model(spec, self._passes(model), dict(model.named_parameters()), self._progress)
