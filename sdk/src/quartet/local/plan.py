"""What the machines of a run tell each other where it has several: files in the run's folder, which all see.

1. `plan.json` is written by the first machine: what each of the others runs. Every launch has a name of its
   own; a machine that runs something of another one ends that.
2. A launch that came to its end says so there, and the machines end with it. One that was killed says
   nothing: they go on, and whoever launches the run again finds them.
3. `N.json` is written by machine N: how it stands under the launch that it names.
4. A file is replaced whole, and opened anew for each look, by which a network's file system shows what is
   new.
5. A plan is carried out only where it is this user's own: it names programs.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pydantic

from quartet.config import ConfigError
from quartet.local.hosts import Hosts
from quartet.local.supervisor import Status

FOLDER: Final = "machines"
PLAN: Final = "plan.json"
POLL_SECONDS: Final = 0.5
#: From one report of a machine to the next, where nothing happens.
BEAT_SECONDS: Final = 5.0
#: A plan names a few keys of each process, and a judge's prompts at most.
MAX_BYTES: Final = 16 << 20

Table = dict[str, Any]
M = TypeVar("M", bound=pydantic.BaseModel)


class Plan(pydantic.BaseModel, frozen=True):
    """What a launch runs."""

    launch: str
    hosts: Hosts
    #: Of each machine, the config table of each of its processes.
    machines: tuple[dict[str, Table], ...]
    ended: bool = False

    @classmethod
    def of(cls, hosts: Hosts, machines: list[dict[str, Table]]) -> Plan:
        """That of a new launch."""
        return cls(launch=secrets.token_hex(8), hosts=hosts, machines=tuple(machines))


class Report(pydantic.BaseModel, frozen=True):
    """How a machine stands."""

    launch: str
    #: "left": somebody ended it there.
    state: Literal["starting", "up", "failed", "left"]
    #: Another one every few seconds, as long as somebody is there.
    beat: int = 0
    #: Why it failed.
    said: str = ""
    statuses: tuple[Status, ...] = ()


def write_plan(folder: Path, plan: Plan) -> None:
    """Tell the machines of a run's folder."""
    _write(folder / FOLDER / PLAN, plan)


def read_plan(folder: Path) -> Plan | None:
    """What the first machine says, if anything. Raises ConfigError where it is not this user's."""
    return _read(folder / FOLDER / PLAN, Plan)


def write_report(folder: Path, machine: int, report: Report) -> None:
    """Tell the first machine."""
    _write(_report_file(folder, machine), report)


def read_report(folder: Path, machine: int, launch: str) -> Report | None:
    """How a machine stands under a launch; None where it knows nothing of that yet."""
    report = _read(_report_file(folder, machine), Report)
    return report if report is not None and report.launch == launch else None


def _report_file(folder: Path, machine: int) -> Path:
    return folder / FOLDER / f"{machine + 1}.json"


def _write(file: Path, content: pydantic.BaseModel) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{file.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(content.model_dump_json())
    made.replace(file)


def _read(file: Path, kind: type[M]) -> M | None:
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ConfigError(f"{file} is not this user's own; start the run and its nodes as one user")
            return kind.model_validate_json(opened.read(MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError:  # ESTALE, where a network's file system replaces it at this moment
        return None
    except pydantic.ValidationError as error:
        raise ConfigError(f"{file} is of another release; install the same one on all machines") from error
