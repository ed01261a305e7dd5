"""What `--dry-run` prints of a run or a fine-tuning: a TOML file of it, and above that, in comments, which
processes a run would have on which machine, and what is used of keys that are left out.

Of another trainer's file that is what was said and nothing that is a default here: a file of one's own to
keep. Of one's own it is the whole run, defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.cli.job import Job
from quartet.cli.run_file import RunFile
from quartet.local.hosts import Hosts
from quartet.local.toml_text import dumps, inline
from quartet.local.wiring import Table
from quartet.run import left_out
from quartet.run.sft import SftConfig


def told(found: RunFile, job: Job, machines: Sequence[Mapping[str, Table]]) -> str:
    """What is printed of a run; `machines`: the tables of each one's processes."""
    everything = dumps(job.config.model_dump(mode="json", exclude_none=True))
    placed = [
        f"# {_named(job.hosts, number)}: {', '.join(_process(*one) for one in there.items())}"
        for number, there in enumerate(machines)
    ]
    used = _used(left_out.of_a_run(job.config))
    return "\n".join([*placed, "", *used, found.toml if found.dialect else everything])


def told_of_sft(config: SftConfig, steps: int) -> str:
    """What is printed of a fine-tuning that has so many steps."""
    used = _used(left_out.of_the_optimizer(config) | ({} if config.max_steps else {"max_steps": steps}))
    unread = {"eval"} if config.validation is None else set()
    return "\n".join([*used, dumps(config.model_dump(mode="json", exclude_none=True, exclude=unread))])


def _used(values: Mapping[str, Any]) -> list[str]:
    """Comments, since in the file they would make another run of it."""
    lines = [f"#   {key} = {inline(value)}" for key, value in values.items()]
    return ["# left out below, and used:", *lines, ""] if lines else []


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
