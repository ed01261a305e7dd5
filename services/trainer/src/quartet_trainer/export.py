"""`python -m quartet_trainer.export STATES TARGET [--state NAME | --versions N,N,...]`: the model of a saved
state as a Hugging Face folder, also of a run that was stopped or killed.

STATES is a run's folder of states, or one state. Of several the newest sound one is taken, unless NAME says
another, or it is the first of these policy versions that has one.

1. States are only read: the trainer whose they are may go on, and prune them meanwhile.
2. TARGET is there whole or not at all, however many write there; what exists is not overwritten.
3. Its files are those that SaveState writes with export_model, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pydantic
import structlog
import torch
import transformers
from quartet.errors import QuartetError, refused
from quartet.kit.folder import remedy_of
from safetensors import SafetensorError

from quartet_trainer import model as base
from quartet_trainer.content import WEIGHTS, Content
from quartet_trainer.mark import MARK
from quartet_trainer.spec import RunSpec
from quartet_trainer.states import StateInfo, StateStore, listed, state_at
from quartet_trainer.trained import Trained, WholeModel

#: Times that the newest state is looked for, while a trainer saves newer ones and prunes what is being read.
MAX_LOOKS = 5
#: What is wrong with what was asked for, and not with a disk.
REFUSALS = frozenset({"INVALID_REQUEST", "INVALID_CONFIG", "RESOURCE_UNKNOWN"})

log = structlog.get_logger()


def export(
    states: Path, target: Path, name: str | None = None, versions: Sequence[int] | None = None
) -> StateInfo:
    """Write the model of a state; returns which one it was.

    Errors: RESOURCE_UNKNOWN, CHECKSUM_MISMATCH, INVALID_CONFIG (the base model is gone or another one, or
    another release wrote the state), INVALID_REQUEST (target, name), NOT_READY (the states cannot be read),
    OSError and SafetensorError (the disk of the target).
    """
    states, target = states.absolute(), target.absolute()
    if os.path.lexists(target):
        raise refused("target", target, "it exists; name a folder that does not")
    run = states.parent if (states / MARK).is_file() else states
    if target.resolve().is_relative_to(run.resolve()):
        raise refused("target", target, "it is among the states; name a folder elsewhere")
    info, content = _found(states, name, versions)
    try:
        spec, trained_of = RunSpec.model_validate(content.meta["spec"]), content.meta["trained"]
        served_dtype, weights = content.meta["served_dtype"], content.tensors[WEIGHTS]
    except (pydantic.ValidationError, KeyError) as error:
        raise _unfit(info, "another release of Quartet wrote it; export with that one") from error
    folder = base.resolve_folder(spec.base_model, allow_hub=False)
    trained = _trained(spec, folder)
    trained.check(trained_of)
    shapes = {key: parameter.shape for key, parameter in trained.parameters.items()}
    if shapes != {key: tensor.shape for key, tensor in weights.items()}:
        raise _unfit(info, f"{folder} holds another model than when it was written; put that one back")
    with torch.no_grad():
        for key, parameter in trained.parameters.items():
            parameter.copy_(weights[key])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as writing:
        trained.export(folder, Path(writing) / "model", served_dtype)
        try:
            (Path(writing) / "model").rename(target)
        except OSError as error:
            if not os.path.lexists(target):
                raise
            raise refused("target", target, "it was written meanwhile; name another folder") from error
    return info


def _found(states: Path, name: str | None, versions: Sequence[int] | None) -> tuple[StateInfo, Content]:
    store, run_id = StateStore(states.parent, keep_last=1), states.name
    if (states / MARK).is_file():
        if name is not None or versions is not None:
            key, value = ("state", name) if versions is None else ("versions", versions)
            raise refused(key, value, f"{states} is one state already; name the folder above it")
        info = state_at(states)
        if info is None:
            raise QuartetError("CHECKSUM_MISMATCH", f"{states / MARK} is harmed", what=str(states / MARK))
        return info, _read(store, info)
    if name is not None:
        info = store.find(run_id, name)
        return info, _read(store, info)
    return _first_sound(store, run_id, states, versions)


def _first_sound(
    store: StateStore, run_id: str, folder: Path, versions: Sequence[int] | None
) -> tuple[StateInfo, Content]:
    """Of the versions in their order, else from the newest on."""
    why = ""
    for _ in range(MAX_LOOKS):
        newest_first = store.list(run_id)[::-1]
        for info in newest_first if versions is None else _in_order(newest_first, versions):
            try:
                return info, _read(store, info)
            except QuartetError as error:
                why = f": {error.message}"
                if not info.path.exists():
                    break  # there are newer ones
                if error.reason == "NOT_READY":
                    raise
                log.warning("state_passed_over", state=info.name, why=error.message)
        else:
            break
    none = "no saved state; a run saves one after every ckpt.interval steps, and where it is stopped"
    said = f"no sound state of a run{why}" if why else none
    raise QuartetError("RESOURCE_UNKNOWN", f"{folder} has {said}", name=str(folder))


def _in_order(states: Sequence[StateInfo], versions: Sequence[int]) -> list[StateInfo]:
    """The states of these versions, in their order. Errors: RESOURCE_UNKNOWN."""
    found = [info for version in versions for info in states if info.policy_version == version]
    if states and not found:
        wanted = ", ".join(map(str, versions))
        raise QuartetError(
            "RESOURCE_UNKNOWN",
            f"no state of policy version {wanted} is kept; there are: {listed(states)}; states of "
            "measured versions stay with ckpt.keep_interval = eval.interval, or a larger ckpt.keep_last",
            name=wanted,
        )
    return found


def _read(store: StateStore, info: StateInfo) -> Content:
    try:
        return store.read(info)
    except QuartetError as error:
        if info.path.exists():
            raise
        raise QuartetError(
            "RESOURCE_UNKNOWN", f"state {info.name} was pruned while it was read; ask again", name=info.name
        ) from error


def _trained(spec: RunSpec, folder: Path) -> Trained:
    seed = spec.seed if spec.from_scratch else None
    model = base.load_model(folder, spec.base_model, device=torch.device("cpu"), seed=seed)
    if spec.lora is None:
        return WholeModel(model)
    from quartet_trainer.lora import Base  # peft takes seconds to import

    return Base(model).join(spec.lora, spec.base_model, spec.seed)


def _unfit(info: StateInfo, remedy: str) -> QuartetError:
    message = f"state {info.name}: {remedy}"
    return QuartetError("INVALID_CONFIG", message, key="states", value=str(info.path), remedy=remedy)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, 130 for one that was stopped; with a sentence on stderr 2 for
    what is refused, 1 for what failed."""
    parser = argparse.ArgumentParser(prog="python -m quartet_trainer.export", description=__doc__)
    parser.add_argument("states", type=Path)
    parser.add_argument("target", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--state", metavar="NAME")
    which.add_argument("--versions", type=_versions, metavar="N,N,...")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        info = export(options.states, options.target, options.state, options.versions)
    except KeyboardInterrupt:
        return 130
    except SafetensorError as error:
        print(f"error: {options.target} cannot be written: {error}; make room there", file=sys.stderr)
        return 1
    except QuartetError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2 if error.reason in REFUSALS else 1
    except OSError as error:
        remedy = remedy_of(error.errno)
        print(f"error: {error}{remedy and f'; {remedy}'}", file=sys.stderr)
        return 1
    print(f"{options.target}: the model of state {info.name}, policy version {info.policy_version}")
    if options.versions and info.policy_version != options.versions[0]:
        print(
            f"of policy version {options.versions[0]} no sound state is kept; in the next run set "
            "ckpt.keep_interval to eval.interval, or a larger ckpt.keep_last"
        )
    return 0


def _versions(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    # As Ctrl-C: what was begun is cleared away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.simplefilter("ignore", FutureWarning)  # of libraries, about each other
    sys.exit(main())
