"""From create_lora_training_client to a RunSpec, and where specs are noted for gateways started later."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf import json_format
from quartet.run.name import is_run_id
from quartet.v1 import trainer_service_pb2 as pb

from quartet_tinker.adam import Adam
from quartet_tinker.bodies import Lora
from quartet_tinker.paths import run_id
from quartet_tinker.refusal import Refused
from quartet_tinker.training import Run

log = structlog.get_logger()

#: The service that the SDK is made for scales adapters by 32 / rank; scripts have learning rates for that.
ALPHA: Final = 32.0
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")


def spec_of(model: str, lora: Lora, adam: Adam) -> pb.RunSpec:
    """What a script's choice means here. Raises Refused."""
    if not (lora.train_attn or lora.train_mlp):
        raise Refused("train_unembed alone is not served here; set train_attn or train_mlp")
    if not 1 <= lora.rank <= 4096:
        raise Refused(f"rank = {lora.rank} is refused; give 1 to 4096")
    spec = pb.RunSpec(
        base_model=model,
        optimizer=adam.spec(),
        seed=secrets.randbits(32) if lora.seed is None else lora.seed % 2**64,
        lora=pb.LoraSpec(rank=lora.rank, alpha=ALPHA),
    )
    if not (lora.train_attn and lora.train_mlp):  # otherwise every linear module but the head
        spec.lora.target_modules.extend(ATTENTION if lora.train_attn else MLP)
    return spec


class Notes:
    """Runs by id, as far as this gateway, or with a folder one before it, created them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[str, Run] = {}

    def keep(self, run: Run, *, is_open: bool = True) -> None:
        """Note a run, or what it is now."""
        self._runs[run.run_id] = run
        if self._folder is None:
            return
        note = {
            "open": is_open,
            "origin": run.origin,
            "base_model": run.base_model,
            "user_metadata": run.user_metadata,
            "spec": json_format.MessageToDict(run.spec, preserving_proto_field_name=True),
        }
        file = self._folder / f"{run.run_id}.json"
        unfinished = file.with_suffix(f".{os.getpid()}")
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(note, indent=2) + "\n")
        unfinished.replace(file)

    def left_open(self) -> list[Run]:
        """Runs that a gateway before this one did not close."""
        files = sorted(self._folder.glob("*.json")) if self._folder is not None else []
        found = []
        for file in files:
            try:
                note = json.loads(file.read_text())
                if note["open"]:
                    found.append(_run(file.stem, note))
            # Cut off by a loss of power, somebody else's, or of another release: the others are closed.
            except (OSError, ValueError, KeyError, TypeError, json_format.Error) as error:
                log.warning("note of a run cannot be read and is passed over", file=str(file), why=str(error))
        return found

    def find(self, origin: str) -> Run:
        """The run that was created for a model. Raises Refused."""
        name = run_id(origin)
        found = self._runs.get(name)
        # An origin comes from a URL, too, in which "/" may be escaped: a note is in the folder or nowhere.
        file = self._folder / f"{name}.json" if self._folder is not None and is_run_id(name) else None
        if found is None and file is not None and file.is_file():
            found = self._runs[name] = _run(name, json.loads(file.read_text()))
        if found is None:
            raise Refused(
                f"no run of tinker://{origin} is known to this gateway; with runs_dir set it knows those "
                "from before it was started",
                status=404,
            )
        return found


def _run(name: str, note: dict[str, Any]) -> Run:
    spec = json_format.ParseDict(note["spec"], pb.RunSpec())
    # Notes of earlier releases have no metadata.
    return Run(name, note["origin"], note["base_model"], spec, note.get("user_metadata", {}))
