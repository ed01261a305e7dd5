"""`quartet rl @ run.toml`: reinforcement learning by four services, on this machine or on several.

1. Whatever can be refused is refused before anything starts, a sentence for each thing, with exit code 2.
2. The exit code is 0 for a completed run, 1 for a failed one, 130 for one that was stopped by Ctrl-C.
3. `prepared`, `completed_before`, `report_again` and `launch` are the same without a command line
   (quartet.grpo): they raise ConfigError for what is refused and RunFailed for what failed, and never end the
   process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet.cli import exits
from quartet.cli.attempt import Attempt, taken
from quartet.cli.carried import refused_by_services
from quartet.cli.chat_template import check_chat_template
from quartet.cli.checked import check_services, doubts, wired
from quartet.cli.context import check_length
from quartet.cli.display import Display, Plain
from quartet.cli.drive import Listen, Outcome, RunRefused, by_signals, drive
from quartet.cli.dry_run import told
from quartet.cli.elsewhere.child import STOPPED_CODE, Ending
from quartet.cli.ended import Ended, say_completed, say_ended
from quartet.cli.env.installed import REFUSALS, with_interpreters
from quartet.cli.initial_state import with_beginning
from quartet.cli.job import FLAGS, Job, Words, model_path, plan
from quartet.cli.job_arguments import add_arguments_of_a_job, keys_of_a_job, own_tables, run_and_folder
from quartet.cli.outputs import Outputs, write_json
from quartet.cli.overwritten import FAILED_LOGS, LOGS, check_not_needed
from quartet.cli.progress import KEPT_NOTES, phase_name
from quartet.cli.reporting import check as check_reporting
from quartet.cli.reporting import is_shown, reporting
from quartet.cli.summary import SUMMARY, is_completed, summary_of, summed_up
from quartet.config import ConfigError
from quartet.config.refusals import gathered, together
from quartet.errors import QuartetError
from quartet.kit.standard_streams import say
from quartet.local.deployment import write
from quartet.local.hosts import FIRST_PORT, Hosts, hosts_of, unnamed
from quartet.local.others import Others
from quartet.local.plan import Plan
from quartet.local.supervisor import ServiceFailed
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED, RUN_PHASE_FAILED, RUN_PHASE_STOPPED


class RunFailed(RuntimeError):
    """A run did not come to its end. `shown`: where it is shown, in a sentence."""

    def __init__(self, sentence: str, shown: str = "") -> None:
        super().__init__(sentence)
        self.shown = shown
        #: Of its services, in the folder.
        self.logs = LOGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are the launcher's own; all others belong to the run's configuration."""
    add_arguments_of_a_job(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would run, start nothing"
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B,...",
        help="machines of a run that has several (trainer.nodes, inference.nodes), this one first; on each "
        "other one: quartet node OUTPUT_DIR",
    )
    parser.add_argument(
        "--first-port",
        type=int,
        default=FIRST_PORT,
        metavar="N",
        help=f"where the machines reach each other, with the next ports (default: {FIRST_PORT})",
    )
    parser.add_argument(
        "--plain", action="store_true", help="one line for each step instead of the live screen"
    )
    # Of a job of SLURM: how much time it has for a stop in order.
    parser.add_argument("--stop-seconds", type=float, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    started = time.monotonic()
    rest = keys_of_a_job(options, rest)
    found, folder = run_and_folder(options, rest)
    names = None if options.hosts is None else options.hosts.split(",")
    placed = [] if names is None else ["--hosts", options.hosts, "--first-port", str(options.first_port)]
    try:
        tables = own_tables(found.config)
        nobody = options.dry_run and names is None  # where it would run need not be known
        hosts = unnamed(tables) if nobody else hosts_of(tables, names, options.first_port)
        job = prepared(
            found.config,
            folder,
            options.run_id,
            resume=options.resume,
            overwrite=options.overwrite,
            words=_words([*rest, *placed]),
            hosts=hosts,
        )
    except ConfigError as error:
        raise together([error, *refused_by_services(found.config.model_dump())]) from None
    if (done := completed_before(job)) is not None and not options.dry_run:
        return _completed_again(job, done)
    machines = check_services(job, needs_gpus=not options.dry_run)
    if options.dry_run:
        for sentence in doubts(job.config):
            say(sentence, sys.stderr)
        print(told(found, job, machines), end="")
        return 0
    plain = options.plain or not sys.stdout.isatty()
    try:
        ended = launch(job, lambda: _display(plain), started, stop_s=options.stop_seconds)
    except RunFailed as error:
        say(f"error: {error}\nLogs are in {job.folder / error.logs}.", sys.stderr)
        if error.shown:
            print(error.shown)
        return exits.FAILED
    code = say_ended(job, ended)
    if ended.shown:
        print(ended.shown)
    return code


def _words(arguments: Sequence[str]) -> Words:
    """Whoever goes on says the same keys again."""
    command = "quartet {arguments} --output-dir {folder} --resume"
    return replace(FLAGS, go_on=command, arguments=("rl", *arguments))


def prepared(
    config: RunConfig,
    folder: Path,
    run_id: str | None = None,
    *,
    resume: bool,
    overwrite: bool,
    words: Words = FLAGS,
    hosts: Hosts | None = None,
) -> Job:
    """The job, whose model, environments and folder are there, on these machines or on this one alone. Raises
    ConfigError; changes nothing."""
    hosts = hosts or hosts_of(own_tables(config), None)
    found, refused = dict[str, Any](), list[ConfigError]()
    with gathered(refused):
        found["model"] = model_path(config.model)
    with gathered(refused):
        found["envhost"] = with_interpreters(config.envhost, config.environment_ids)
    with gathered(refused):
        model = Path(found["model"]) if "model" in found else None
        config = with_beginning(config, model, folder if resume else None)
    if "model" in found:
        with gathered(refused):
            check_length(config, Path(found["model"]))
        with gathered(refused):
            check_chat_template(Path(found["model"]), config.inference, config.environment_ids)
    config = config.model_copy(update=found)
    # What goes on is compared with what began, for which all of it has to be found.
    if not (resume and refused):
        with gathered(refused):
            job = plan(config, folder.absolute(), run_id, resume=resume, overwrite=overwrite, words=words)
    if not resume:
        with gathered(refused):
            check_not_needed(config, folder, words.elsewhere)
    if refused:
        raise together(refused)
    return replace(job, hosts=hosts)


def launch(
    job: Job,
    open_display: Callable[[], Display],
    started: float,
    listen: Listen = by_signals,
    stop_s: float | None = None,
) -> Ended:
    """Take the folder, run in it, write the result. Raises ConfigError, RunFailed."""
    try:
        with taken(job) as attempt:
            try:
                ended = _in_folder(job, attempt, open_display, started, listen, stop_s)
            except OSError as error:
                why = f"{error.filename or job.folder} cannot be written or read: {error.strerror or error}"
                then = f"mend that, then go on with: {job.words.going_on(job.folder)}"
                raise RunFailed(f"{why}; {then}") from error
        return replace(ended, put_back=attempt.put_back)
    except RunFailed as failed:
        if not attempt.put_back:
            raise
        unbegun = RunFailed(
            f"{failed}\nThe run did not begin; {job.folder} holds what it held.", failed.shown
        )
        unbegun.logs = FAILED_LOGS
        raise unbegun from failed


def _in_folder(
    job: Job,
    attempt: Attempt,
    open_display: Callable[[], Display],
    started: float,
    listen: Listen,
    stop_s: float | None,
) -> Ended:
    machines = wired(job, job.folder)
    specs = write(machines[0], job.folder, job.hosts)
    others = Others(job.folder, Plan.of(job.hosts, machines))
    outputs = Outputs(job.folder, job.config.keep_rollouts)
    display = open_display()
    with reporting(job.config, job.folder, display.say) as reporter:
        with contextlib.closing(display):
            display.say(f"run {job.run_id} in {job.folder}")
            for sentence in doubts(job.config):
                display.say(sentence)
            try:
                outcome = asyncio.run(
                    drive(
                        specs,
                        others,
                        job.run_id,
                        job.config_toml,
                        outputs,
                        display,
                        reporter,
                        attempt.accepted,
                        listen,
                        stop_s,
                        job.config.environment_ids,
                    )
                )
            except RunRefused:
                attempt.refused()
                raise
            except QuartetError as error:
                if error.reason in REFUSALS:
                    raise ConfigError(error.message) from error
                then = f"go on with: {job.words.going_on(job.folder, str(error))}"
                raise RunFailed(f"{error}; {then}") from error
            except ServiceFailed as error:
                raise RunFailed(str(error)) from error
        before = _summary_before(job)
        seconds = before.get("wall_seconds", 0.0) + time.monotonic() - started
        summary = summed_up(
            job.run_id,
            job.config,
            outcome.run,
            step=outputs.progress.step,
            wall_seconds=seconds,
            restarts=outcome.restarts,
            agents=outputs.progress.agents,
            notes=list(dict.fromkeys((*before.get("notes", ()), *outputs.progress.notes)))[-KEPT_NOTES:],
        )
        # That of the run as it stood, where nothing of this part was begun.
        if outcome.run.run_id or not job.resumed:
            write_json(job.folder / SUMMARY, summary)
        shown = reporter.finish(_ending(summary))
    return _ended(job, outcome, summary, shown)


def _display(plain: bool) -> Display:
    if plain:
        return Plain()
    from quartet.cli.live import LiveScreen

    return LiveScreen()


def _ending(summary: dict[str, Any]) -> Ending:
    """What is told elsewhere at the end of a run."""
    codes = {phase_name(RUN_PHASE_COMPLETED): exits.DONE, phase_name(RUN_PHASE_FAILED): exits.FAILED}
    return Ending(codes.get(summary["phase"], STOPPED_CODE), summary)


def _ended(job: Job, outcome: Outcome, summary: dict[str, Any], shown: str) -> Ended:
    """How it ended. Raises RunFailed, also where it stopped by itself: somebody has to mend something."""
    run = outcome.run
    stopped = run.phase == RUN_PHASE_STOPPED
    asked = outcome.interrupted and run.phase != RUN_PHASE_FAILED
    if asked or run.phase == RUN_PHASE_COMPLETED or (stopped and not run.error):
        return Ended(summary, run.phase == RUN_PHASE_COMPLETED, shown)
    then = f"; go on with: {job.words.going_on(job.folder, run.error)}" if stopped else ""
    raise RunFailed(f"the run is {phase_name(run.phase)}: {run.error or 'see the logs'}{then}", shown)


def completed_before(job: Job) -> dict[str, Any] | None:
    """The summary of the run that is to be gone on with, where it has reached its end."""
    summary = _summary_before(job)
    return summary if is_completed(summary, job.config.max_steps) else None


def _summary_before(job: Job) -> dict[str, Any]:
    """What the last part said of the run that is gone on with; empty where it came to no end."""
    return summary_of(job.folder) if job.resumed else {}


def _completed_again(job: Job, summary: dict[str, Any]) -> int:
    """Nothing is left to do, but for what it may lack where it is shown."""
    say_completed(job, summary)
    print(f"nothing is left to do; with max_steps above {summary['steps']} it goes on from here")
    if shown := report_again(job, summary):
        print(shown)
    return 0


def report_again(job: Job, summary: dict[str, Any]) -> str:
    """Tell of a completed run what is lacking where it is shown. Where that is. Raises ConfigError."""
    if not is_shown(job.config):
        return ""
    check_reporting(job.config)
    with taken(job), reporting(job.config, job.folder, print) as reporter:
        return reporter.catch_up(job.run_id, job.config_toml, _ending(summary))
