"""What `quartet rl --dry-run` prints: the run as a TOML file, and above it, in comments, which processes it
would have on which machine.

Of another trainer's file that is what was said and nothing that is a default here: a file of one's own to
keep. Of one's own it is the whole run, defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.cli.job import Job
from quartet.cli.run_file import RunFile
from quartet.local.hosts import Hosts
from quartet.local.toml_text import dumps
from quartet.local.wiring import Table


def told(found: RunFile, job: Job, machines: Sequence[Mapping[str, Table]]) -> str:
    """What is printed of a run; `machines`: the tables of each one's processes."""
    everything = dumps(job.config.model_dump(mode="json", exclude_none=True))
    placed = [
        f"# {_named(job.hosts, number)}: {', '.join(_process(*one) for one in there.items())}"
        for number, there in enumerate(machines)
    ]
    return "\n".join([*placed, "", found.toml if found.dialect else everything])


def _named(hosts: Hosts, number: int) -> str:
    if not hosts.are_several:
        return "on this machine"
    return f"on {hosts.names[number]}" if hosts.are_known else f"on machine {number + 1}"


def _process(name: str, table: Mapping[str, Any]) -> str:
    """A process, its ranks if it has several, and its devices if they were shared out."""
    ranks, gpus = table.get("ranks", 1), table.get("gpus")
    more = [f"{ranks} ranks"] if ranks != 1 else []
    if gpus is not None:
        more.append(f"GPU {', '.join(gpus)}" if gpus else "no GPU")
    return f"{name} ({', '.join(more)})" if more else name
