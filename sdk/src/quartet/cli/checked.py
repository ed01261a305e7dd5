"""What a job's services would be started with, and what they refuse of it before anything is.

The machine where this runs is looked at whole. Of the others each looks at itself (quartet/cli/node.py); here
their config is looked at.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quartet.cli.carried import refused_by_services
from quartet.cli.context import beyond_context
from quartet.cli.job import Job
from quartet.cli.reporting import check as check_reporting
from quartet.cli.run_tables import tables_of
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, without_device, write
from quartet.local.wiring import Table, wire_machines
from quartet.run.config import RunConfig

#: Below it an adapter of the usual size stays where it is for hundreds of steps.
LEAST_ADAPTER_RATE = 5e-6


def wired(job: Job, folder: Path) -> list[dict[str, Table]]:
    """The tables of each machine's processes, whose files are in the folder. Raises ConfigError."""
    reference = job.config.algorithm.reference
    teacher = reference.address if reference is not None else None
    if job.hosts.are_several and teacher and "security" not in job.config.orchestrator:
        raise ConfigError(
            f"algorithm.reference.address = {teacher!r} is called as the run's own services are, and "
            "would be shown the token of the launch; over several machines give doors of your own "
            "(orchestrator.security, ...; docs/deploy.md), or let the trainer hold the model"
        )
    goes_on_with = job.run_id if job.resumed else ""
    tables = tables_of(job.config)
    return wire_machines(job.config.model, folder / "data", tables, job.hosts, goes_on_with, teacher)


def check_services(job: Job, *, apart: bool = False, needs_gpus: bool = True) -> list[dict[str, Table]]:
    """Let every service check its config, in a folder that is thrown away; `apart` in processes of their own,
    which leave the output and the arguments of this one alone. Where GPUs are not needed yet and are not here
    that is said, and no refusal. The tables of each machine's processes, as checked. Raises ConfigError.
    """
    check_reporting(job.config)
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        try:
            machines = wired(job, Path(scratch))
            specs = write(machines[0], Path(scratch), job.hosts)
        except ConfigError as error:
            others = refused_by_services(job.config.model_dump(), apart=apart)
            raise together([error, *others]) from None
        if not needs_gpus and (services := without_device(specs)):
            print(
                f"{' and '.join(services)} would compute on GPUs, and this machine has none (no driver is "
                "loaded): the run is refused here, and what they need of a machine is not checked",
                file=sys.stderr,
            )
        _check_machines(job, Path(scratch), machines, specs, apart=apart, needs_gpus=needs_gpus)
    return machines


def doubts(config: RunConfig) -> Iterator[str]:
    """What is allowed and seldom meant, a sentence each."""
    rate = config.learning_rate
    if config.lora.enabled and config.optimizer == "adamw" and rate < LEAST_ADAPTER_RATE:
        is_said = "learning_rate" in config.model_fields_set
        told = f"learning_rate = {rate:g}" if is_said else f"learning_rate is left out, and {rate:g}"
        yield f"{told} hardly moves an adapter; 1e-5 to 1e-4 are usual"
    cap = config.algorithm.clip_high
    if config.algorithm.loss == "cispo" and cap is not None and cap < 1:
        yield (
            f'algorithm.clip_high = {cap:g} is of loss = "cispo" the cap of the ratio itself (4 where not '
            "said), and ratios begin at 1: every token is cut; for [1 - clip_low, 1 + clip_high] choose "
            'loss = "ppo"'
        )
    window, longest = config.algorithm.overlong_penalty, config.longest_answer
    if window is not None and longest is not None and window.from_tokens >= longest:
        yield (
            f"algorithm.overlong_penalty.from_tokens = {window.from_tokens} is not below sampling.max_tokens "
            f"= {longest}: only rollouts of several turns get there, any other loses nothing"
        )
    yield from beyond_context(config)


def _check_machines(
    job: Job,
    folder: Path,
    machines: list[dict[str, Table]],
    here: list[ChildSpec],
    *,
    apart: bool,
    needs_gpus: bool,
) -> None:
    """What runs here, and the last machine's, as every other that only samples: each looks at itself there.
    Raises ConfigError."""
    known = job.hosts.are_known
    checks = [check(here, apart=apart, of_machine=known, needs_gpus=needs_gpus)]
    for number in job.hosts.all_kinds[1:]:
        there = write(machines[number], folder, job.hosts, number)
        checks.append(check(there, apart=apart, of_machine=False))
    refusals = []
    for one in checks:
        try:
            asyncio.run(one)
        except ConfigError as error:
            refusals.append(error)
    if refusals:
        raise together(refusals)
