"""A SLURM of this machine's own: munged, slurmctld and a slurmd for each of a few nodes that are called by
addresses of loopback.

1. Everything is in one folder, and listens on loopback; nothing of the machine's own SLURM is read.
2. `cluster` ends what it began, by process id, and what its jobs left running.
3. No wait is without a bound.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Which a test needs.
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
START_SECONDS: Final = 60.0
END_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.2
SBIN: Final = "/usr/sbin:/sbin"

CONFIG: Final = """\
ClusterName=quartet
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldDebug=debug
StateSaveLocation={folder}/state
SlurmUser=root
SlurmdUser=root
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=debug
SlurmdSpoolDir={folder}/spool-%n
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=100000,sched_interval=5
ReturnToService=2
KillWait={kill_wait}
MinJobAge=600
PlugStackConfig={folder}/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """It, while it runs."""

    folder: Path
    names: list[str]
    environment: dict[str, str]

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of SLURM's says. Raises AssertionError with its words where it fails."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode, ..."""
        said = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def wait(
        self, job: str, state: str, seconds: float = 60.0, said: Callable[[], str] = lambda: ""
    ) -> dict[str, str]:
        """Until the job is in the state; what is known of it then."""
        until(lambda: self.state(job)["JobState"] == state, seconds, f"job {job} {state}", said)
        return self.state(job)

    def logs(self) -> str:
        """The ends of all logs of the daemons."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def missing() -> str:
    """Why there can be no cluster here, in a sentence; empty where there can."""
    lacks = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacks:
        return f"{', '.join(lacks)}: not installed (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd wants root, which runs this in a container of its own"


@contextmanager
def cluster(folder: Path, nodes: int, kill_wait: int = 10) -> Iterator[Cluster]:
    """A cluster of so many nodes, each of which has two cores."""
    names = [f"127.0.0.{11 + number}" for number in range(nodes)]
    ports = _free_ports(nodes + 1)
    lines = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs=2 State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    )
    (folder / "state").mkdir(parents=True)
    (folder / "none").touch()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, controller_port=ports[0], nodes=lines, kill_wait=kill_wait)
    )
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    } | {"SLURM_CONF": str(config), "PATH": _path()}
    it = Cluster(folder, names, environment)
    with ExitStack() as ended:
        _munged(it, ended)
        _daemon(it, ended, "slurmctld", ["slurmctld", "-D", "-f", str(config)])
        for name in names:
            _daemon(it, ended, f"slurmd-{name}", ["slurmd", "-D", "-N", name, "-f", str(config)])

        def idle() -> bool:
            done = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"],
                env=environment, capture_output=True, text=True,
            )  # fmt: skip
            return done.stdout.split() == ["idle"] * nodes

        until(idle, START_SECONDS, "all nodes idle", it.logs)
        try:
            yield it
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=60)
            _empty(it)


def until(true: Callable[[], bool], seconds: float, what: str, said: Callable[[], str] = lambda: "") -> None:
    """Wait for it. Raises AssertionError after so long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{said()}"
        time.sleep(POLL_SECONDS)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SBIN}"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def _munged(it: Cluster, ended: ExitStack) -> None:
    key = it.folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = {name: it.folder / f"munge.{name}" for name in ("socket", "pid", "seed")}
    command = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}",
        f"--pid-file={files['pid']}", f"--seed-file={files['seed']}", f"--log-file={it.folder}/munged.log",
    ]  # fmt: skip
    _daemon(it, ended, "munged", command)
    until(files["socket"].exists, START_SECONDS, "munged listens", it.logs)


def _daemon(it: Cluster, ended: ExitStack, name: str, command: list[str]) -> None:
    said = ended.enter_context((it.folder / f"{name}.out.log").open("wb"))
    process = subprocess.Popen(
        command, env=it.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
    )
    ended.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _empty(it: Cluster) -> None:
    """Wait for the end of all jobs; their processes are no children of ours, and are killed by id."""
    with contextlib.suppress(AssertionError):
        until(lambda: not it.call("squeue", "--noheader"), END_SECONDS, "no job is left")
    mark = f"SLURM_CONF={it.environment['SLURM_CONF']}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            # Steps and what they began; the daemons are ours, and end after this.
            if mark in entry.read_bytes().split(b"\0") and b"SLURM_JOB_ID=" in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
