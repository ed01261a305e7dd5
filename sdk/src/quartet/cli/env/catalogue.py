"""`quartet env list` and `show`: what is installed, from package metadata, and from the host where it is
loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from quartet.cli.env.installed import CLASSIC_PYTHON, ENVIRONMENTS_PYTHON, made, run_in
from quartet.kit.standard_streams import shown
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

# A line of JSON for each distribution that needs Verifiers and is no part of it or of Quartet.
LIST = """
import importlib.metadata, json
# What an uninstall left behind has no name.
named = [one for one in importlib.metadata.distributions() if one.metadata["Name"]]
versions = {one.metadata["Name"].lower(): one.version for one in named}
for one in named:
    needs = [need for need in one.requires or () if "extra ==" not in need]
    if any(need.startswith("verifiers") for need in needs):
        print(json.dumps({"name": one.metadata["Name"], "version": one.version,
                          "verifiers": versions.get("verifiers", "")}))
"""


@dataclass(frozen=True)
class Installed:
    """An environment in an interpreter."""

    name: str
    version: str
    verifiers: str
    python: str

    @property
    def generation(self) -> str:
        """As the host would say once it is loaded: the interpreter decides."""
        if not self.verifiers:
            return "?"
        return "classic" if self.verifiers.startswith("0.3.") else "v1"


def interpreters(also: Sequence[str]) -> list[str]:
    """Those of this machine that may have environments."""
    known = [ENVIRONMENTS_PYTHON, CLASSIC_PYTHON, *map(str, made())]
    return [*also, *(python for python in known if Path(python).exists()), sys.executable]


def catalogue(pythons: Sequence[str]) -> list[Installed]:
    """What each has. Raises ConfigError."""
    found: list[Installed] = []
    for python in pythons:
        for line in run_in(python, LIST).stdout.splitlines():
            row = json.loads(line)
            found.append(Installed(row["name"].lower(), row["version"], row["verifiers"], python))
    return sorted(found, key=lambda one: one.name)


def catalogue_table(found: Sequence[Installed]) -> Table:
    """For a person."""
    table = Table("environment", "version", "api", "verifiers", "interpreter", box=None, padding=(0, 2))
    for one in found:
        table.add_row(one.name, one.version, one.generation, one.verifiers or "missing", one.python)
    return table


def info_lines(info: EnvironmentInfo, python: str, example: dict[str, Any]) -> list[str]:
    """What the host says of an environment."""
    sizes = (
        "without end"
        if info.infinite
        else f"{info.train_size} to train on, {info.eval_size} to evaluate with"
    )
    verifiers = f", verifiers {info.verifiers_version}" if info.verifiers_version else ""
    lines = [
        f"{info.id} {info.version}".rstrip(),
        f"  api          {info.api}{verifiers}",
        f"  interpreter  {python}",
        f"  examples     {sizes}",
        f"  rewards      {', '.join(info.rewards) or '-'}",
        f"  metrics      {', '.join(info.metrics) or '-'}",
        f"  digest       {info.digest or '-'}",
        "  first example:",
    ]
    for name, value in example.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"    {name}: {text if len(text) <= 300 else text[:299] + '…'}")
    return [shown(line) for line in lines]
