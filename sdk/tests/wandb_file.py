"""Reads the file of a run that wandb keeps beside what it uploads: LevelDB's log format, with a record of
wandb's protobuf in each entry. The library writes it in Go and has no reader in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES, ENTRY_BYTES = 7, 32768, 7
FULL, FIRST, LAST = 1, 2, 4


@dataclass
class Written:
    """What a run's file holds."""

    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    #: Of each row, with the library's own step as "_step".
    history: list[dict[str, Any]] = field(default_factory=list)
    #: Step metric of each name or pattern.
    x_axes: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def entries(content: bytes) -> Iterator[bytes]:
    """The records, put together from their fragments."""
    assert content[:4] == b":W&B"
    at, parts = HEADER_BYTES, b""
    while at + ENTRY_BYTES <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < ENTRY_BYTES:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts = (b"" if kind in (FULL, FIRST) else parts) + content[at + ENTRY_BYTES :][:size]
        at += ENTRY_BYTES + size
        if kind in (FULL, LAST):
            yield parts


def _keyed(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def read(file: Path) -> Written:
    """The whole of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    written = Written()
    for entry in entries(file.read_bytes()):
        record = Record.FromString(entry)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                written.config |= _keyed(run.config.update)
                names = ("run_id", "display_name", "project", "entity", "run_group")
                written.run = {name: getattr(run, name) for name in names} | {"tags": list(run.tags)}
            case "config":
                written.config |= _keyed(record.config.update)
            case "summary":
                written.summary |= _keyed(record.summary.update)
            case "history":
                written.history.append(_keyed(record.history.item))
            case "metric":
                metric = record.metric
                written.x_axes[metric.name or metric.glob_name] = metric.step_metric
            case "exit":
                written.exit_code = record.exit.exit_code
    return written
