"""From create_lora_training_client to a RunSpec, and where specs are noted for gateways started later."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf import json_format
from quartet.kit.folder import flush, remedy_of
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
    """Runs by id, as far as this gateway, or with a folder one before it, created them.

    What is noted survives a loss of power: the loop waits for the disk, since notes are small and seldom.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[str, Run] = {}

    def keep(self, run: Run, *, is_open: bool = True) -> None:
        """Note a run, or what it is now. Raises Refused, of a disk that does not take it."""
        if self._folder is None:
            self._runs.pop(run.run_id, None)  # it comes last again
            self._runs[run.run_id] = run
            return
        note = {
            "open": is_open,
            "origin": run.origin,
            "base_model": run.base_model,
            "user_metadata": run.user_metadata,
            "spec": json_format.MessageToDict(run.spec, preserving_proto_field_name=True),
        }
        file = self._folder / f"{run.run_id}.json"
        try:
            _write_durably(file, json.dumps(note, indent=2) + "\n")
        except OSError as error:
            raise Refused(
                f"the run cannot be noted in the gateway's runs_dir, {str(self._folder)!r}: "
                f"{error.strerror}; {remedy_of(error.errno, 'mend the disk and try again')}",
                category="server",
            ) from error
        self._runs[run.run_id] = run

    def left_open(self) -> list[Run]:
        """Runs that a gateway before this one did not close."""
        files = sorted(self._folder.glob("*.json")) if self._folder is not None else []
        read = [note for note in map(_read, files) if note is not None]
        return [run for run, is_open in read if is_open]

    async def page(self, offset: int, limit: int) -> tuple[list[Run], int]:
        """Some of the runs, those noted last first, and how many there are."""
        if self._folder is None:
            runs = list(reversed(self._runs.values()))
            return runs[offset : offset + limit], len(runs)
        return await asyncio.to_thread(_page, self._folder, offset, limit)

    def find(self, origin: str) -> Run:
        """The run that was created for a model. Raises Refused."""
        name = run_id(origin)
        found = self._runs.get(name)
        # An origin comes from a URL, too, in which "/" may be escaped: a note is in the folder or nowhere.
        file = self._folder / f"{name}.json" if self._folder is not None and is_run_id(name) else None
        if found is None and file is not None and file.is_file():
            note = _read(file)
            if note is None:
                told = f"the note of tinker://{origin} cannot be read; the log says which file, and why"
                raise Refused(told, status=404)
            found = self._runs[name] = note[0]
        if found is None:
            raise Refused(
                f"no run of tinker://{origin} is known to this gateway; with runs_dir set it knows those "
                "from before it was started",
                status=404,
            )
        return found


def _page(folder: Path, offset: int, limit: int) -> tuple[list[Run], int]:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    read = map(_read, files[offset : offset + limit])
    return [note[0] for note in read if note is not None], len(files)


def _read(file: Path) -> tuple[Run, bool] | None:
    """The run of a note, and whether it is open; of what cannot be read nothing, which the log is told."""
    try:
        note: dict[str, Any] = json.loads(file.read_text())
        spec = json_format.ParseDict(note["spec"], pb.RunSpec())
        # Notes of earlier releases have no metadata.
        run = Run(file.stem, note["origin"], note["base_model"], spec, note.get("user_metadata", {}))
        return run, bool(note.get("open"))
    # Damaged, somebody else's, or of another release: the others are read.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, json_format.Error) as error:
        log.warning("note of a run cannot be read and is passed over", file=str(file), why=repr(error))
        return None


def _write_durably(file: Path, text: str) -> None:
    """The disk has all of it afterwards, or what was there before. Errors: OSError."""
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True)
        flush(file.parent.parent)
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        with unfinished.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    flush(file.parent)
