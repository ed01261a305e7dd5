"""What a new run begins with where that is another one's saved state, or an adapter (initial_adapter.py).

1. Of a state it has the weights, and of the optimizer the moments with the number of steps that they are of;
   the rest is its own: version 0, schedule, seed, reference, adaptive coefficients.
2. With the same batches and a constant rate it comes to the bits that the other run comes to.
3. The state is only read. Once the new run has a state of its own it is not needed any more.
4. With a fresh optimizer it has the weights alone: moments are zero, of no step, and may be another kind's.
5. What would be other weights than the state's, or moments of other steps, is refused: an adapter of another
   rank or scale, a whole model for an adapter, another optimizer, routers that were frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.adapter_config import AdapterConfig
from quartet.errors import QuartetError
from quartet.kit.folder import unreadable_part

from quartet_trainer.coefficients import Coefficients
from quartet_trainer.content import MOMENTS, WEIGHTS, Content
from quartet_trainer.initial_adapter import check_tensors, without_copies
from quartet_trainer.spec import LoraSpec, RunSpec
from quartet_trainer.states import StateInfo, state_at
from quartet_trainer.trained import Trained
from quartet_trainer.wire.refusal import config

#: Of what a state says: steps of its optimizer before the first of its run.
STEPS_BEFORE = "steps_before"


def initial_state(spec: RunSpec) -> StateInfo | None:
    """The state that the run begins with, if with one. Errors: INVALID_CONFIG."""
    if not spec.initial_state:
        return None
    try:
        info = state_at(Path(spec.initial_state))
    except OSError as error:  # too long for a name, or another user's alone
        why = f"it cannot be read: {error.strerror}; name another, or let this user (chmod -R a+rX)"
        raise _refused(spec, why) from error
    if info is None:
        raise _refused(spec, "there is no complete state; name the folder of one (SavedState.path)")
    # Weights are written for their owner alone.
    if (part := unreadable_part(info.path)) is not None:
        raise _refused(spec, f"this user cannot read {part}; let it (chmod -R a+rX)")
    return info


def beginning(spec: RunSpec, content: Content, trained: Trained, served_dtype: str) -> Content:
    """What was read, as the state of this run that has done nothing yet. Errors: INVALID_CONFIG."""
    if spec.initial_state:
        return _of_state(spec, content, served_dtype)
    assert spec.lora is not None, "it begins with one or the other"
    weights = without_copies(spec.lora, content.tensors[WEIGHTS], trained)
    check_tensors(spec.lora, weights, trained.parameters)
    return Content(_meta(trained.meta(), 0, served_dtype), {WEIGHTS: weights}, content.folder)


def _check_fits(spec: RunSpec, content: Content) -> None:
    """Whether a state has what the run trains, and the moments of its optimizer. (Of modules the parameters
    know.) Errors: INVALID_CONFIG."""
    held = content.meta["spec"]
    is_adapter = held["lora"] is not None
    if is_adapter != (spec.lora is not None):
        ours, theirs = ("the whole model", "an adapter") if is_adapter else ("an adapter", "the whole model")
        raise _refused(spec, f"it is of {theirs}, and the run trains {ours}; train {theirs} (lora)")
    if spec.lora is not None:
        _check_adapter(spec, spec.lora, held["lora"])
    if spec.fresh_optimizer:
        return
    kind = held["optimizer"]["kind"]
    if kind != spec.optimizer.kind:
        raise _refused(
            spec,
            f"its moments are those of {kind}, and the run has {spec.optimizer.kind}; train with {kind}, or "
            "begin with its weights alone (fresh_optimizer)",
        )
    if held.get("freeze_routers") and not spec.freeze_routers:
        # Of these the moments would be of other steps than those of the rest, and a state says one number.
        raise _refused(
            spec,
            "it has no moments of the routers, which its run froze; set freeze_routers, or begin with its "
            "weights alone (fresh_optimizer)",
        )


def _check_adapter(spec: RunSpec, lora: LoraSpec, held: Mapping[str, Any]) -> None:
    # What an earlier release saved has none of these.
    stacked, saved = tuple(held.get("target_parameters", ())), tuple(held["modules_to_save"])
    found = AdapterConfig(held["rank"], held["alpha"], held["rslora"], None, stacked, saved, beyond={})
    unlike = found.unlike(lora.rank, lora.alpha, lora.rslora, lora.modules_to_save, lora.target_parameters)
    for key, (ours, theirs) in unlike.items():
        why = f"the state in initial_state = {spec.initial_state!r} has {theirs}; set that"
        raise config(f"lora.{key}", ours, why)


def _of_state(spec: RunSpec, content: Content, served_dtype: str) -> Content:
    _check_fits(spec, content)
    stems = (WEIGHTS,) if spec.fresh_optimizer else (WEIGHTS, MOMENTS)
    steps = 0 if spec.fresh_optimizer else optimizer_steps(content.meta)
    kept = {stem: content.tensors[stem] for stem in stems if stem in content.tensors}
    return Content(_meta(content.meta["trained"], steps, served_dtype), kept, content.folder)


def _meta(trained: Mapping[str, Any], steps_before: int, served_dtype: str) -> dict[str, Any]:
    return {
        "trained": trained,
        "policy_version": 0,
        "skipped_steps": 0,
        STEPS_BEFORE: steps_before,
        "loss_broken": False,
        **Coefficients().meta(),
        "served_dtype": served_dtype,
        "published_version": None,
        "published_digest": None,
    }


def optimizer_steps(meta: Mapping[str, Any]) -> int:
    """That a state's moments are of, those of runs before its own included."""
    return int(meta.get(STEPS_BEFORE, 0)) + int(meta["policy_version"]) - int(meta["skipped_steps"])


def _refused(spec: RunSpec, why: str) -> QuartetError:
    return config("initial_state", spec.initial_state, why)
