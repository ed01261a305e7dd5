"""Whose a saved state is: what the run that saved it was created with, against what somebody wants.

1. A state of another spec is RUN_CONFLICT, naming the field: a name may have been used before.
2. A spec with settings that this release does not know is INVALID_CONFIG, like a state of another form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pydantic
import xxhash
from quartet.errors import QuartetError
from quartet.exported.manifest import mismatch

from quartet_trainer.spec import RunSpec, difference, extends
from quartet_trainer.states import META, StateInfo
from quartet_trainer.wire.refusal import first


def meta_of(info: StateInfo, mark: Mapping[str, Any]) -> dict[str, Any]:
    """What a state says of itself beside its tensors, which are not read. Errors: CHECKSUM_MISMATCH. Raises
    OSError."""
    written = (info.path / META).read_bytes()
    if xxhash.xxh3_128_hexdigest(written) != mark["files"][META]["xxh3_128"]:
        raise mismatch(f"{META!r} of state {info.name}")
    meta: dict[str, Any] = json.loads(written)
    return meta


def held_spec(info: StateInfo, meta: Mapping[str, Any]) -> RunSpec:
    """What the run was created with. Errors: INVALID_CONFIG."""
    try:
        return RunSpec.model_validate(meta["spec"])
    except pydantic.ValidationError as error:
        key, _, why = first(error)
        remedy = "use the release that wrote it, or an empty state_dir"
        raise QuartetError(
            "INVALID_CONFIG",
            f"state {info.name} in {info.path} was saved by another release: {key}: {why}; {remedy}",
            key="state_dir",
            value=info.path,
            remedy=remedy,
        ) from error


def check_same(run_id: str, held: RunSpec, wanted: RunSpec, where: str) -> None:
    """Whether a run that exists somewhere is the one that is asked for. Errors: RUN_CONFLICT."""
    _check(run_id, held, wanted, f"run {run_id} exists in {where}", "choose another run_id")


def check_is_of(run_id: str, info: StateInfo, held: RunSpec, wanted: RunSpec) -> None:
    """Whether a state is one of that run, before it was extended too. Errors: RUN_CONFLICT."""
    if not extends(held, wanted):
        what = f"state {info.name} of run {run_id} is of another run of that name: it was saved"
        _check(run_id, held, wanted, what, "those of this run are not here any more")


def _check(run_id: str, held: RunSpec, wanted: RunSpec, what: str, remedy: str) -> None:
    differs = difference(held, wanted)
    if differs is not None:
        key, ours, theirs = differs
        raise QuartetError(
            "RUN_CONFLICT",
            f"{what} with {key} = {ours!r}, not {theirs!r}; {remedy}",
            run_id=run_id,
            field=key,
            held=ours,
            wanted=theirs,
        )
