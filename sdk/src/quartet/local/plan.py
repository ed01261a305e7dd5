"""What the machines of a run tell each other where it has several: files in the run's folder, which all see.

1. `plan.json` is written by the first machine: what each of the others runs. Every launch has a name of its
   own; a machine that runs something of another one ends that.
2. A launch that came to its end says so there, and the machines end with it. One that was killed says
   nothing, but `launcher.json` changes every BEAT_SECONDS as long as it lives.
3. `N.json` is written by machine N: how it stands under the launch that it names.
4. A file is replaced whole, and opened anew for each look, by which a network's file system shows what is
   new. Nobody but the launcher makes the folder.
5. A plan is carried out only where it is this user's own: it names programs. A report that is not, or that
   nobody can read, says nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import pydantic

from quartet.config import ConfigError
from quartet.local.hosts import Hosts
from quartet.local.supervisor import Status

FOLDER: Final = "machines"
PLAN: Final = "plan.json"
LAUNCHER: Final = "launcher.json"
#: Of a file that is not there, or not at this moment; all else is wrong with the folder.
AWAY: Final = (errno.ENOENT, errno.ESTALE, errno.EIO)
POLL_SECONDS: Final = 0.5
#: From one sign of life to the next.
BEAT_SECONDS: Final = 2.0
#: A plan names a few keys of each process, and a judge's prompts at most.
MAX_BYTES: Final = 16 << 20

Table = dict[str, Any]
M = TypeVar("M", bound=pydantic.BaseModel)


class _Told(pydantic.BaseModel):
    # What another release says besides is no reason to guess; numbers are TOML's.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Plan(_Told):
    """What a launch runs."""

    launch: str
    #: Where it was launched.
    folder: str
    hosts: Hosts
    #: Of each machine but the first, the config table of each of its processes.
    machines: tuple[dict[str, Table], ...]
    ended: bool = False

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.machines) != len(self.hosts.names) or not all(self.machines[1:]):
            raise ValueError("each of the other machines has processes")
        return self

    @classmethod
    def of(cls, hosts: Hosts, machines: list[dict[str, Table]]) -> Plan:
        """That of a new launch."""
        others = ({}, *machines[1:])
        return cls(launch=secrets.token_hex(8), folder=str(Path.cwd()), hosts=hosts, machines=others)


class Report(_Told):
    """How a machine stands."""

    launch: str
    #: "left": somebody ended it there.
    state: Literal["starting", "up", "failed", "left"]
    #: Another one every few seconds, as long as somebody is there.
    beat: int = 0
    #: Why it failed.
    said: str = ""
    statuses: tuple[Status, ...] = ()


class Beat(_Told):
    """That a launcher lives."""

    launch: str
    beat: int
    #: All machines are there: ranks may look for each other.
    goes: bool = False


def write_plan(folder: Path, plan: Plan) -> None:
    """Tell the machines of a run's folder. Errors: OSError."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    _write(folder / FOLDER / PLAN, plan)


def write_beat(folder: Path, beat: Beat) -> None:
    """Tell them that the launcher lives. Errors: OSError."""
    _write(folder / FOLDER / LAUNCHER, beat)


def read_beat(folder: Path) -> Beat | None:
    """The launcher's last sign of life."""
    return _read_if_sound(folder / FOLDER / LAUNCHER, Beat)


def read_plan(folder: Path) -> Plan | None:
    """What the first machine says, if anything. Raises ConfigError where it is no plan of this user's."""
    return _read(folder / FOLDER / PLAN, Plan)


def write_report(folder: Path, machine: int, report: Report) -> None:
    """Tell the first machine. Errors: OSError."""
    _write(_report_file(folder, machine), report)


def read_report(folder: Path, machine: int, launch: str) -> Report | None:
    """How a machine stands under a launch; None where it knows nothing of that yet."""
    report = _read_if_sound(_report_file(folder, machine), Report)
    return report if report is not None and report.launch == launch else None


def lock_of(folder: Path, machine: int) -> Path:
    """The file that whoever does a machine's part holds."""
    return folder / FOLDER / f"{machine + 1}.lock"


def _report_file(folder: Path, machine: int) -> Path:
    return folder / FOLDER / f"{machine + 1}.json"


def _write(file: Path, content: pydantic.BaseModel) -> None:
    made = file.with_name(f".{file.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(content.model_dump_json())
    made.replace(file)


def _read_if_sound(file: Path, kind: type[M]) -> M | None:
    with contextlib.suppress(ConfigError):
        return _read(file, kind)
    return None


def _read(file: Path, kind: type[M]) -> M | None:
    try:
        # Not blocking: it may be anything.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ConfigError(f"{file} is not this user's own; start the run and its nodes as one user")
            return kind.model_validate_json(opened.read(MAX_BYTES))
    except OSError as error:
        if error.errno in AWAY:
            return None
        raise ConfigError(f"{file} cannot be read: {error.strerror}; name the run's folder") from error
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"{file} cannot be read as what this release writes; install the same one on all machines"
        ) from error
