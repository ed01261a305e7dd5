"""What the services refuse of their tables in a run's file that is refused itself, so that both are mended
before the next try. (Of a run that is not, they look at what they would be started with: rl.py.)

What the launcher itself refuses of a table comes first, and the services look at the rest.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quartet.cli.job import model_path
from quartet.config import ConfigError
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, write
from quartet.local.hosts import unnamed
from quartet.local.wiring import SERVICES, Table, wire_machines
from quartet.run.service_tables import own_keys

#: Keys of tables that the launcher reads before any service does.
READ_HERE = ("context_parallel", "gpus", "nodes", "python", "replicas", "server")


def refused_by_services(run: Mapping[str, Any], *, apart: bool = False) -> Iterator[ConfigError]:
    """Of a run's tables as they were written; not what the run refuses of them by itself. `apart` as of
    `check`."""
    tables = {name: _own(name, run.get(name, {})) for name in SERVICES}
    if not any(tables.values()):
        return
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        folder = Path(scratch)
        model = _no_model(folder)
        if isinstance(named := run.get("model"), str) and named:
            try:
                model = model_path(named)
            except ConfigError as error:
                yield error
        try:
            specs = _specs(model, folder, tables)
        except ConfigError as error:
            yield from error.each
            rest = {name: _of_the_service(table) for name, table in tables.items()}
            specs = _specs(model, folder, rest)
        try:
            asyncio.run(check(specs, apart=apart, of_machine=False))
        except ConfigError as error:
            yield from error.each


def _specs(model: str, folder: Path, tables: Mapping[str, Table]) -> list[ChildSpec]:
    """Of every process that the tables mean, wherever it would be. Raises ConfigError."""
    hosts = unnamed(tables)
    machines = wire_machines(model, folder / "data", tables, hosts)
    return [spec for machine in hosts.all_kinds for spec in write(machines[machine], folder, hosts, machine)]


def _no_model(folder: Path) -> str:
    """What stands for a model that is not there: inference looks for the folder."""
    (folder / "config.json").write_text("{}")
    return str(folder)


def _own(service: str, table: Any) -> dict[str, Any]:
    return own_keys(service, table) if isinstance(table, dict) else {}


def _of_the_service(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in READ_HERE}
