"""What the services refuse of their tables in a run's file that is refused itself, so that both are mended
before the next try. (Of a run that is not, they look at what they would be started with: rl.py.)
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quartet.cli.job import model_path
from quartet.config import ConfigError
from quartet.local.deployment import SERVICES, check, wire, write
from quartet.run.service_tables import own_keys


def refused_by_services(run: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Of a run's tables as they were written; not what the run refuses of them by itself."""
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
            asyncio.run(check(write(wire(model, folder / "data", tables), folder), of_machine=False))
        except ConfigError as error:
            yield from error.each


def _no_model(folder: Path) -> str:
    """What stands for a model that is not there: inference looks for the folder."""
    (folder / "config.json").write_text("{}")
    return str(folder)


def _own(service: str, table: Any) -> dict[str, Any]:
    return own_keys(service, table) if isinstance(table, dict) else {}
