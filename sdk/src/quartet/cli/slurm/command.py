"""`quartet slurm @ run.toml`: a run of `quartet rl`, handed to SLURM.

1. Whatever `quartet rl` would refuse is refused here, a sentence for each thing, with exit code 2; but for
   what only the machines of the job can tell.
2. What is queued is written down in FOLDER.slurm beside the run's folder: a change of the user's own file
   later changes nothing.
3. One job at a time has a folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from quartet.cli import exits
from quartet.cli.carried import refused_by_services
from quartet.cli.checked import check_services
from quartet.cli.job import RUN_FILE, Job
from quartet.cli.job_arguments import add_arguments_of_a_job, keys_of_a_job, own_tables, run_and_folder
from quartet.cli.outputs import PRIVATE, write_text
from quartet.cli.rl import completed_before, prepared
from quartet.cli.slurm.script import SCRIPT, Queued, gpus_of, script_of
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.counted import counted
from quartet.local.hosts import machines_of, unnamed
from quartet.local.toml_text import dumps

#: The number of the job that has the folder, or had it last.
NUMBER: Final = "job"
#: sbatch and squeue ask a controller, which may be busy.
ASK_SECONDS: Final = 120
#: What a line `#SBATCH --output=...` cannot say.
NOT_IN_A_FOLDER: Final = "\n\r\\\"'"

DESCRIPTION = """\
Hand a run to SLURM: `quartet rl` on the first of the job's machines, `quartet node` on the others.

  quartet slurm @ run.toml [@ more.toml ...] [--key value ...] --output-dir FOLDER

    [trainer]
    nodes = 2                # machines that train; default 1
    [inference]
    nodes = 4                # machines that sample; default 0, on the trainer's first one
    [slurm]
    partition = "gpu"
    time = "12:00:00"        # stopped in order before, queued again, gone on with
    setup = ["module load cuda"]

FOLDER, this folder and this Python have to be on a file system that all machines see. FOLDER.slurm has the
script and the log of the job.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are none of the run's configuration."""
    add_arguments_of_a_job(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the script, queue nothing"
    )
    parser.add_argument("--hosts", help=argparse.SUPPRESS)  # of quartet rl, to say what is instead of it


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    job = _checked(options, rest)
    begin: Literal["", "--resume", "--overwrite"] = (
        "--resume" if options.resume else "--overwrite" if options.overwrite else ""
    )
    tables = own_tables(job.config)
    queued = Queued(job.run_id, job.folder, Path.cwd(), machines_of(tables), gpus_of(tables), begin)
    script = script_of(queued, job.config.slurm)
    _check_script(script)
    if options.dry_run:
        print(script, end="")
        return exits.DONE
    if (done := completed_before(job)) is not None:
        steps = counted(done["steps"], "step")
        print(f"the run {job.run_id!r} was completed in {steps}; a larger max_steps goes on")
        return exits.DONE
    _check_unqueued(queued)
    number = _submit(job, queued, script)
    _say_queued(queued, number)
    return exits.DONE


def _checked(options: argparse.Namespace, rest: list[str]) -> Job:
    """The run, as `quartet rl` would begin it. Raises ConfigError."""
    if options.hosts is not None:
        raise ConfigError(
            "--hosts is refused: SLURM chooses machines, as many as trainer.nodes and inference.nodes say; "
            f'to have these: slurm.options = ["--nodelist={options.hosts}"]'
        )
    rest = keys_of_a_job(options, rest)
    found, folder = run_and_folder(options, rest)
    folder = Path(os.path.abspath(folder))
    if wrong := next((char for char in str(folder) if char in NOT_IN_A_FOLDER), None):
        raise ConfigError(f"output folder {str(folder)!r} is refused: SLURM takes no name with {wrong!r}")
    try:
        # Known are not even those of a run on one: it is another machine than this.
        hosts = replace(unnamed(own_tables(found.config)), are_known=False)
        job = prepared(
            found.config,
            folder,
            options.run_id,
            resume=options.resume,
            overwrite=options.overwrite,
            hosts=hosts,
        )
    except ConfigError as error:
        raise together([error, *refused_by_services(found.config.model_dump())]) from None
    check_services(job)
    return job


def _check_script(script: str) -> None:
    """Whether bash can read it: lines of the user's are in it. Raises ConfigError."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"slurm.setup is refused: bash says {done.stderr.strip()}; mend its lines")


def _check_unqueued(queued: Queued) -> None:
    """Whether no other job has the folder. Raises ConfigError."""
    file = queued.beside / NUMBER
    if not file.exists() or shutil.which("squeue") is None:
        return
    number = file.read_text().strip()
    done = _ask("squeue", "--noheader", "--format=%T", f"--jobs={number}")
    if done.returncode == 0 and (state := done.stdout.strip()):
        raise ConfigError(
            f"output folder {queued.folder} has the job {number} ({state}); wait for its end, end it with "
            f"'scancel {number}', or name another --output-dir"
        )


def _submit(job: Job, queued: Queued, script: str) -> str:
    """The job's number. Raises ConfigError."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not installed here; run this where SLURM is, or take the script that --dry-run prints "
            "as a pattern for your own"
        )
    queued.beside.mkdir(parents=True, exist_ok=True)
    frozen = dumps(job.config.model_dump(mode="json", exclude_none=True))
    write_text(queued.beside / RUN_FILE, frozen, PRIVATE)
    write_text(queued.beside / SCRIPT, script, PRIVATE)
    done = _ask("sbatch", "--parsable", str(queued.beside / SCRIPT))
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise ConfigError(f"sbatch took no job: {said}; what it asks for is in [slurm] (--dry-run shows it)")
    number = done.stdout.strip().splitlines()[-1].partition(";")[0]
    write_text(queued.beside / NUMBER, f"{number}\n", PRIVATE)
    return number


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """SLURM. Raises ConfigError where it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{command[0]} did not answer within {ASK_SECONDS} s; look with squeue whether there is a job, "
            "and try again later"
        ) from None


def _say_queued(queued: Queued, number: str) -> None:
    machines = "one machine" if queued.machines == 1 else f"{queued.machines} machines"
    folder = shlex.quote(str(queued.folder))
    commands = {
        f"squeue -j {number}": "whether it runs",
        f"tail -F {shlex.quote(str(queued.beside / number))}.log": "what it says",
        f"quartet panes {folder}": "the logs of its services, once it runs",
        f"scancel --batch --signal=TERM {number}": "stop after the step under way",
        f"scancel {number}": "end at once; what was done is kept",
    }
    width = max(map(len, commands))
    print(f"job {number}: the run {queued.run_id!r} in {queued.folder}, on {machines}")
    for command, what in commands.items():
        print(f"  {command:<{width}}  {what}")
