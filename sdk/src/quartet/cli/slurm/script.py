"""The script of a job: what SLURM runs on the first machine of a run.

1. Machines are SLURM's to choose. `quartet rl` runs on the first, which it waits for, and on each other one
   `quartet node`, which srun starts.
2. USR1 is SLURM's word that the time limit is near, TERM its word that the job ends. Either lets the run stop
   after the step under way; after USR1 the job is queued again, if it is to be and a step was done.
3. A job that is queued again goes on with the run, whatever it was queued with at first.
4. Its exit code is that of `quartet rl`; 1 where the part of another machine ended before the run.

Pure: the text follows from its arguments.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from quartet.cli.job import RECORD, RUN_FILE
from quartet.local.plan import FOLDER, PLAN
from quartet.run.slurm import SlurmConfig

SCRIPT: Final = "job.sh"
#: As each run of the job begins; what is newer, this one wrote.
BEGUN: Final = "begun"
#: Of two jobs on one machine the ports are so far apart: a run of more replicas has its machines for itself.
#: They are below those that the services of a single machine get (quartet/local/ports.py).
FIRST_PORT: Final = 10_000
PORTS_OF_A_JOB: Final = 200
JOBS: Final = 49
#: For the other machines, from the end of the run to theirs: they look every half second, and drain.
END_SECONDS: Final = 20
#: Of the time before the limit, for what comes after the step under way: services drain, the other machines
#: end, and the job is queued again.
AFTER_THE_STEP_SECONDS: Final = 40

BODY: Final = """\
say() { echo "quartet slurm: $*" >&2; }
setup_ended() {
    [ "$1" -ne 0 ] || return 0
    say "slurm.setup: $2: exit code $1; mend that line, and queue the run again"
    exit 1
}

asked=  # "limit": the time limit is near; "end": the job ends
lost=   # the part of another machine ended before the run
heard=
rl=
# Not TERM: SLURM may have sent one to all processes of the job, and quartet rl is killed by the second.
# However many HUPs it gets, it stops in order; but for where somebody has them ignored.
word=HUP
[ -z "$(trap -p HUP)" ] || word=TERM
tell() { heard=yes; [ -z "$rl" ] || kill -"$word" "$rl" 2>/dev/null; }
trap 'asked=${asked:-limit}; tell' USR1
trap 'asked=end; sleep 1; tell' TERM INT
trap 'lost=yes; tell' USR2

cd -- "$queued_from" || exit 1
#SETUP
set -u
export PYTHONUNBUFFERED=1

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${SLURMD_NODENAME:-${hosts[0]}}
others=
number=1
for host in "${hosts[@]}"; do
    [ "$host" = "$first" ] || { others=$others,$host; number=$((number + 1)); }
done
if [ "$number" -ne "$machines" ]; then
    say "the run has $machines machines, and the job has $SLURM_JOB_NODELIST; queue it by quartet slurm"
    exit 1
fi

words=(rl @ "$beside/run.toml" --output-dir "$folder" --run-id "$run_id" --plain)
words+=(--stop-seconds "$for_the_step")
if [ "$machines" -gt 1 ]; then
    words+=(--hosts "$first$others" --first-port $((#FIRST_PORT + SLURM_JOB_ID % #JOBS * #PORTS_OF_A_JOB)))
    rm -f -- "$folder/machines/plan.json"  # of a job that was killed, with the machines that it had
fi
# What was there when the job was queued is deleted, or is of a run that nobody accepted: what is newer is of
# this job.
if [ "$folder/run.json" -nt "$beside/run.toml" ]; then begin=--resume; fi
[ -z "$begin" ] || words+=("$begin")

say "job $SLURM_JOB_ID, started ${SLURM_RESTART_COUNT:-0} times before, on $first$others"
touch -- "$beside/begun"
code=130
step=
if [ -z "$asked" ]; then
    if [ "$machines" -gt 1 ]; then
        {
            srun --nodes=$((machines - 1)) --ntasks=$((machines - 1)) --ntasks-per-node=1 \\
                --nodelist="${others#,}" --overlap --cpu-bind=none --kill-on-bad-exit=1 --label \\
                bash -c 'exec "$@" --host "$SLURMD_NODENAME"' node "${quartet[@]}" node "$folder" \\
                </dev/null || kill -USR2 $$
        } &
        step=$!
    fi
    "${quartet[@]}" "${words[@]}" </dev/null &
    rl=$!
    [ -z "$asked$lost" ] || tell  # asked just before there was anyone to tell
    while :; do
        heard=
        wait "$rl"
        code=$?
        [ -n "$heard" ] || break  # else it was a signal that ended the waiting
    done
    rl=
fi
trap '' USR2  # whatever becomes of the other machines' parts, the run had ended

if [ -n "$step" ]; then
    for _ in $(seq $((#END_SECONDS * 2))); do
        kill -0 "$step" 2>/dev/null || break
        sleep 0.5
    done
fi
case $code in
    129 | 130 | 143) ;;  # stopped, or ended by a signal before it listened to any
    *) asked=no ;;
esac
if [ -n "$lost" ] && [ -z "$asked" ]; then
    say "the part of another machine ended before the run, which was stopped: its words are above"
    code=1
fi
if [ "$asked" = limit ]; then
    if [ -z "$requeue" ]; then
        say "the time limit is near, and slurm.requeue_at_time_limit = false"
    elif [ ! "$folder/metrics.jsonl" -nt "$beside/begun" ]; then
        say "no step was done within the time limit, and it would be so again: raise slurm.time"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "the time limit is near; the job is queued again, and goes on"
        exit "$code"
    else
        say "the time limit is near, and SLURM does not queue the job again"
    fi
fi
if [ "$code" -ne 0 ] && [ -e "$folder/run.json" ]; then
    again=$(printf "%q @ %q --output-dir %q" slurm "$folder/run.toml" "$folder")
    say "as a job it goes on with: quartet $again --resume"
fi
exit "$code"
"""


@dataclass(frozen=True)
class Queued:
    """A run as it is handed to SLURM."""

    run_id: str
    #: Absolute; the job's own folder is beside it.
    folder: Path
    queued_from: Path
    machines: int
    #: Of each machine; None: not said.
    gpus: int | None
    begin: Literal["", "--resume", "--overwrite"] = ""

    @property
    def beside(self) -> Path:
        """The job's own folder: the run's file, the script, the logs."""
        return self.folder.with_name(f"{self.folder.name}.slurm")


def script_of(queued: Queued, slurm: SlurmConfig) -> str:
    """The whole script."""
    values = {
        "folder": str(queued.folder),
        "beside": str(queued.beside),
        "queued_from": str(queued.queued_from),
        "run_id": queued.run_id,
        "machines": str(queued.machines),
        "begin": queued.begin,
        "requeue": "yes" if slurm.requeue_at_time_limit else "",
        "for_the_step": str(slurm.stop_seconds - AFTER_THE_STEP_SECONDS),
    }
    body = BODY.replace("#SETUP\n", "".join(_setup(slurm.setup)))
    numbers = {"#FIRST_PORT": FIRST_PORT, "#JOBS": JOBS, "#PORTS_OF_A_JOB": PORTS_OF_A_JOB}
    for name, number in (numbers | {"#END_SECONDS": END_SECONDS}).items():
        body = body.replace(name, str(number))
    written = (f"folder/{RECORD}", f"beside/{RUN_FILE}", f"beside/{BEGUN}", f"folder/{FOLDER}/{PLAN}")
    assert all(f"${name}" in BODY for name in written), "the script has these names"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options_of(queued, slurm)),
        "",
        f"# The run {queued.run_id}, by quartet slurm. Written anew whenever the run is queued.",
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        f"quartet=({shlex.join([sys.executable, '-m', 'quartet.cli'])})",
        "",
        body,
    ]
    return "\n".join(lines)


def options_of(queued: Queued, slurm: SlurmConfig) -> Iterator[str]:
    """Those of sbatch."""
    yield f"--job-name={slurm.job_name or re.sub(r'[^A-Za-z0-9_.-]', '-', queued.folder.name)}"
    yield f"--nodes={queued.machines}"
    yield "--ntasks-per-node=1"
    gpus = slurm.gpus_per_node
    if gpus is None and not any(option.startswith(("--gpus", "--gres")) for option in slurm.options):
        gpus = queued.gpus
    for name, value in {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "gpus-per-node": gpus or None,
        "cpus-per-task": slurm.cpus_per_task,
    }.items():
        if value is not None:
            yield f"--{name}={value}"
    if slurm.exclusive:
        yield "--exclusive"
        if not any(option.startswith("--mem") for option in slurm.options):
            yield "--mem=0"  # all of it; a partition's default is for a share of a machine
    # A partition may have a limit where the job says none; what a signal has no time for is not sent.
    yield f"--signal=B:USR1@{slurm.stop_seconds}"
    # Also where a machine fails, or another job takes its place.
    yield "--requeue"
    # %: SLURM's own patterns.
    yield f"--output={str(queued.beside).replace('%', '%%')}/%j.log"
    yield "--open-mode=append"
    yield from slurm.options


def gpus_of(tables: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many GPUs a machine of the run needs, where [trainer] and [inference] say it."""
    given = {name: tables[name]["gpus"] for name in ("trainer", "inference") if "gpus" in tables[name]}
    if not given:
        return None
    beside = not tables["inference"].get("nodes", 0)
    shares = [list(given.values())] if beside else [[gpus] for gpus in given.values()]
    return max(_needed(share) for share in shares)


def _needed(share: list[Any]) -> int:
    """Of those that are on one machine: numbers of devices, or lists that name them."""
    count: int = sum(len(gpus) if isinstance(gpus, list) else gpus for gpus in share)
    named: list[int] = [device for gpus in share if isinstance(gpus, list) for device in gpus]
    return max(count, *(device + 1 for device in named), 0)


def _setup(lines: tuple[str, ...]) -> Iterator[str]:
    for line in lines:
        yield f"{line}\nsetup_ended $? {shlex.quote(line)}\n"
