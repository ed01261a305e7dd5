"""What can be said against a run before anything of it is loaded (CheckRun).

1. It refuses nothing that CreateRun, or the first ForwardBackward, would take.
2. It computes nothing and holds nothing: it may be asked while another run trains. Of a hub id it fetches the
   configuration alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from quartet import quantized
from quartet.chat_identity import chat_identity
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.beginning import initial_state
from quartet_trainer.initial_adapter import initial_adapter
from quartet_trainer.machine import Machine
from quartet_trainer.model import named_by, resolve_folder
from quartet_trainer.routing import may_have_routers
from quartet_trainer.spec import RunSpec
from quartet_trainer.wire.refusal import config


def check_run(
    spec: RunSpec, custom_loss: str, custom_args: Mapping[str, object], machine: Machine
) -> pb.CheckRunResponse:
    """Whether nothing is known against it, and against a loss of one's own that gets these by name. What its
    model makes prompts with, and whether it may have routers. Errors: INVALID_CONFIG."""
    if custom_loss and custom_loss not in machine.losses:
        named = ", ".join(sorted(machine.losses))
        remedy = f'start the trainer with losses.{custom_loss} = "package.module:function"'
        why = f"its losses are {named}; name one of them, or {remedy}"
        raise config("custom_loss", custom_loss, why)
    if custom_loss and (why := machine.losses[custom_loss].refuses(custom_args)):
        said = f"losses.{custom_loss} does not take it: {why}; give it what its function takes"
        raise config("custom_args", json.dumps(custom_args), said)
    initial_state(spec)
    initial_adapter(spec)
    folder, model = _check_model(spec.base_model, machine.hub, "base_model", weights=not spec.from_scratch)
    if spec.reference is not None and spec.reference.model:
        _check_model(spec.reference.model, machine.hub, "reference.model", weights=True)
    chat = chat_identity(folder, spec.base_model)
    return pb.CheckRunResponse(chat=chat, has_routers=None if may_have_routers(model) else False)


def check_states(keep_states: int, max_states: int) -> None:
    """Whether a run that would have so many saved states at once may. Errors: INVALID_CONFIG."""
    if keep_states > max_states:
        why = (
            f"this trainer keeps {max_states} states of a run at most (max_states); keep fewer of the "
            "newest, or one less often"
        )
        raise config("keep_states", f"{keep_states} states", why)


def _check_model(model: str, hub: bool, key: str, *, weights: bool) -> tuple[Path, Any]:
    """Its folder and its configuration."""
    with named_by(key):
        folder = resolve_folder(model, hub, ("config.json",))
    try:
        # Its own code is never run (model.py 4).
        read = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise config(key, model, f"the configuration in {folder} cannot be read: {why}") from error
    if weights and (found := quantized.refusal(read, folder)):
        raise config(key, model, f"{folder} cannot be trained: {'; '.join(found)}")
    if weights and Path(model).expanduser().is_dir() and not any(folder.glob("*.safetensors")):
        raise config(key, model, f"{folder} has no weights (*.safetensors); name a whole model folder")
    return folder, read
