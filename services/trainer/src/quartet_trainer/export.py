"""`python -m quartet_trainer.export STATES TARGET [--state NAME]`: the model of a saved state as a Hugging
Face folder, also of a run that was stopped or killed.

STATES is a run's folder of states, whose newest sound one is taken unless NAME says another, or one state.

1. States are only read: the trainer whose they are may go on.
2. TARGET is there whole or not at all; what exists is not overwritten.
3. Its files are those that SaveState writes with export_model, bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from quartet.errors import QuartetError

from quartet_trainer import model as base
from quartet_trainer.run import WEIGHTS
from quartet_trainer.spec import RunSpec
from quartet_trainer.states import MARK, Content, StateInfo, StateStore
from quartet_trainer.trained import Trained, WholeModel


def export(states: Path, target: Path, name: str | None = None) -> StateInfo:
    """Write the model of a state; returns which one it was.

    Errors: RESOURCE_UNKNOWN, CHECKSUM_MISMATCH, INVALID_CONFIG (its base model is gone, or another release
    wrote it), OSError.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; name a folder that does not")
    info, content = _found(states, name)
    spec = RunSpec.model_validate(content.meta["spec"])
    folder = base.resolve_folder(spec.base_model, allow_hub=False)
    trained = _trained(spec, folder)
    trained.check(content.meta["trained"])
    with torch.no_grad():
        for key, parameter in trained.parameters.items():
            parameter.copy_(content.tensors[WEIGHTS][key])
    writing = target.with_name(f".{target.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        trained.export(folder, writing, content.meta["served_dtype"])
        writing.rename(target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return info


def _found(states: Path, name: str | None) -> tuple[StateInfo, Content]:
    states = states.absolute()
    is_state = (states / MARK).is_file()
    folder = states.parent if is_state else states
    store, run_id = StateStore(folder.parent, keep_last=1), folder.name
    if is_state:
        name = states.name.rpartition("@")[0]
    if name is not None:
        info = store.find(run_id, name)
        return info, store.read(info)
    newest = store.newest_sound(run_id)
    if newest is None:
        raise QuartetError("RESOURCE_UNKNOWN", f"{folder} has no sound state of a run", name=str(folder))
    return newest


def _trained(spec: RunSpec, folder: Path) -> Trained:
    seed = spec.seed if spec.from_scratch else None
    model = base.load_model(folder, spec.base_model, device=torch.device("cpu"), seed=seed)
    if spec.lora is None:
        return WholeModel(model)
    from quartet_trainer.lora import Base  # peft takes seconds to import

    return Base(model).join(spec.lora, spec.base_model, spec.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m quartet_trainer.export", description=__doc__)
    parser.add_argument("states", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--state", metavar="NAME")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        info = export(options.states, options.target, options.state)
    except (QuartetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.target}: the model of state {info.name}, policy version {info.policy_version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
