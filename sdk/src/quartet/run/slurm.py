"""The [slurm] table: how a run is handed to SLURM.

It belongs to whoever queues the run (`quartet slurm`), not to the run: another one, or none, is the same run.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Final

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.values import PositiveCount

#: Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, as sbatch reads them.
TIME: Final = re.compile(r"(?:\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2})")
#: By so much SLURM may send the signal early (sbatch, --signal), and its clock is read no more often. Some of
#: it is for the end of services and job (quartet/cli/slurm/script.py).
LEAST_STOP_SECONDS: Final = 60
#: What sbatch takes for a signal's time.
MOST_STOP_SECONDS: Final = 65_535
#: Options of sbatch that this table, or the job's script, has another place for, and which.
HAS_ITS_PLACE: Final = {
    "--account": "slurm.account",
    "--array": "a run is one job; queue each run by itself",
    "--chdir": "the job runs in the folder that it is queued from",
    "--cpus-per-task": "slurm.cpus_per_task",
    "--error": "the log is in the folder beside the run's",
    "--exclusive": "slurm.exclusive",
    "--gpus-per-node": "slurm.gpus_per_node",
    "--job-name": "slurm.job_name",
    "--nodes": "trainer.nodes and inference.nodes",
    "--ntasks": "trainer.nodes and inference.nodes",
    "--ntasks-per-node": "trainer.nodes and inference.nodes",
    "--open-mode": "the log goes on where a job is queued again",
    "--output": "the log is in the folder beside the run's",
    "--partition": "slurm.partition",
    "--qos": "slurm.qos",
    "--signal": "slurm.stop_seconds",
    "--test-only": "quartet slurm --dry-run",
    "--time": "slurm.time",
    "--wait": "the command queues the run and returns",
    "--wrap": "the job is the run",
}

#: What stands on a line of a script behind `#SBATCH`, as one word.
Word = Annotated[str, Field(pattern=r"^[^\s\"'\\#]+$")]


class SlurmConfig(Config):
    """A job of SLURM's: what it asks for, and how it ends."""

    #: Default: the name of the run's folder.
    job_name: Word | None = None
    #: Where the job waits and runs.
    partition: Word | None = None
    #: Who pays for it.
    account: Word | None = None
    #: Its quality of service.
    qos: Word | None = None
    #: The limit, as SLURM writes it; default: that of the partition.
    time: str | int | None = None
    #: No other job on the machines.
    exclusive: bool = True
    #: Default: what [trainer] gpus and [inference] gpus need on a machine, where they say it.
    gpus_per_node: Annotated[int, Field(ge=0, strict=True)] | None = None
    #: Cores of each machine, where exclusive = false.
    cpus_per_task: PositiveCount | None = None
    #: Further options of sbatch, such as "--constraint=h100".
    options: tuple[str, ...] = ()
    #: Lines of bash that run once on the first machine, before anything; what they export, all machines get.
    setup: tuple[str, ...] = ()
    #: How long before the time limit the run is told to stop after the step under way.
    stop_seconds: Annotated[int, Field(ge=LEAST_STOP_SECONDS, le=MOST_STOP_SECONDS, strict=True)] = 300
    #: Whether the job is queued again then, and goes on.
    requeue_at_time_limit: bool = True

    @property
    def limit_seconds(self) -> int | None:
        """The time limit, where the table says one."""
        return None if self.time is None else _seconds(str(self.time))

    @pydantic.field_validator("time", mode="before")
    @classmethod
    def _is_a_time(cls, time: Any) -> Any:
        if isinstance(time, datetime.time):  # as TOML reads it without quotes
            time = time.isoformat()
        given = str(time) if isinstance(time, str | int) and not isinstance(time, bool) else ""
        if time is not None and (not TIME.fullmatch(given) or not _seconds(given)):
            raise ValueError(
                'give minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS, as SLURM writes a time limit: "12:00:00"'
            )
        return time

    @pydantic.field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.partition("=")[0]
            if not re.fullmatch(r"--[a-z][a-z-]*(?:=[^\n\r]+)?", option):
                raise ValueError(f'{option!r} is no option of sbatch in its long form; write "--name=value"')
            if name in HAS_ITS_PLACE:
                raise ValueError(f"{name} has its own place: {HAS_ITS_PLACE[name]}; remove it here")
        return options

    @pydantic.field_validator("setup", mode="before")
    @classmethod
    def _are_lines(cls, setup: Any) -> Any:
        if isinstance(setup, str):
            raise ValueError('give a list of lines, such as ["module load cuda"]')
        for line in setup if isinstance(setup, (list, tuple)) else ():
            if isinstance(line, str) and (re.search(r"[\n\r\0]", line) or line.endswith("\\")):
                raise ValueError(f"{line!r} is no whole line; write each command as one of the list")
        return setup

    @rule
    def _stops_in_time(self) -> None:
        limit = self.limit_seconds
        if limit is not None and limit <= self.stop_seconds:
            raise ValueError(
                f"slurm.time = {self.time!r} is {limit} seconds, and slurm.stop_seconds = "
                f"{self.stop_seconds} of them are for the end; raise slurm.time, or lower slurm.stop_seconds"
            )


def _seconds(time: str) -> int:
    """Of a time limit in SLURM's form."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    seconds = parts.pop()
    minutes = parts.pop()
    return (sum(parts) * 60 + minutes) * 60 + seconds
