"""`quartet eval`: rollouts of hosted environments, measured.

1. Whatever can be refused is refused before anything starts, in one sentence, with exit code 2.
2. Exit code 0 only where every rollout has a result. What failed is counted apart and named.
3. Ended at any moment, also by SIGKILL or a full disk, it goes on with --resume and plays only what has no
   result. What it was asked for need not be said again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli import exits
from quartet.cli.eval.ablation import for_a_folder
from quartet.cli.eval.arguments import (
    MODEL_KEYS,
    OUTPUT_DIR,
    PLAY_KEYS,
    env_args,
    environment_first,
    given_keys,
    one_run_id,
)
from quartet.cli.eval.board import Board, Tally, board, print_table, result_table
from quartet.cli.eval.config import EvalFileConfig, OneEvalConfig
from quartet.cli.eval.kept import (
    ASKED,
    EVALUATIONS,
    SERVICES,
    asked_again,
    keep,
    latest,
    new_run_id,
    put_back,
    refused,
)
from quartet.cli.eval.other_flags import OF_EVAL, refuse_others
from quartet.cli.eval.player import Player
from quartet.cli.eval.record import METADATA, Record
from quartet.cli.eval.rollouts import describe, play, reference, tasks_of
from quartet.cli.eval.rows import failure_kind
from quartet.cli.eval.services import deploy, with_host
from quartet.cli.eval.source import Source, choose
from quartet.cli.held import held
from quartet.config import ConfigError, load, validate
from quartet.config.load import Draft, merged
from quartet.errors import QuartetError
from quartet.kit import standard_streams
from quartet.kit.folder import check_folder
from quartet.local.beside import AddressBook
from quartet.local.child import ChildSpec
from quartet.local.supervisor import ServiceFailed
from quartet.run.name import RULE, is_run_id
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import Rollout, Task

#: As many as file systems take: earlier releases' evaluations, which are gone on with, have such names.
MAX_FOLDER_CHARS, DIGEST_CHARS = 255, 16
#: Of a new evaluation that only is checked: no run may be called so.
DRY_RUN_ID = "(dry run)"


@dataclass(frozen=True)
class Plan:
    """What is to be done, all of it checked."""

    source: Source
    records: Sequence[Record]
    services: Path
    run_id: str
    output_dir: Path = Path(OUTPUT_DIR)

    @property
    def again(self) -> str:
        """The command that goes on with it."""
        return EVALUATIONS.again(self.run_id, self.output_dir)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: an environment, `@ file.toml`, `--key value`."""
    config = read(options, rest)
    plan = plan_of(config, choose(config, config.rollout_seconds), options)
    env_ids = [one.trial.hosted.id for one in plan.records]
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
            deploy(plan.source, Path(scratch), env_ids, config.envhost, config.inference)
        print(config.model_dump_json(indent=2, exclude_none=True))
        return 0
    refusal = f"{plan.services} belongs to an evaluation that is going on; wait for it"
    with held(plan.services, f"{refusal}, or choose another --run-id"):
        specs = deploy(plan.source, plan.services, env_ids, config.envhost, config.inference)
        asked_before = keep(plan.services, config)
        _play(plan, specs, asked_before, plain=options.plain)
    return report(plan)


def _play(plan: Plan, specs: Sequence[ChildSpec], asked_before: str | None = None, *, plain: bool) -> None:
    tallies = [Tally(record.trial.name) for record in plan.records]
    with contextlib.closing(board(tallies, plain=plain)) as shown:
        shown.say(f"run {plan.run_id}; logs are in {plan.services / 'logs'}")

        async def work(host: Any, policy: Player | None, book: AddressBook) -> None:
            await evaluate(host, policy, plan.records, tallies, shown)

        try:
            with_host(specs, plan.source, work)
        except (ConfigError, KeyboardInterrupt, OSError, QuartetError, ServiceFailed) as error:
            is_refused = isinstance(error, ConfigError)
            begun = any((one.folder / METADATA).exists() for one in plan.records)
            if is_refused and not begun:
                refused(plan.services)
            if not isinstance(error, KeyboardInterrupt) and not any(one.wanted for one in tallies):
                put_back(plan.services, asked_before)
            if any(one.results for one in plan.records) if is_refused else begun:
                print(f"what was done is kept; go on with {plan.again}", file=sys.stderr)
            raise


def read(options: argparse.Namespace, rest: list[str]) -> EvalFileConfig:
    """The configuration of the file, the flags and the environment named before them; where --resume is all
    that says what is evaluated, what was asked for then, and its name in `options`. Raises ConfigError."""
    named, rest = environment_first(rest, several="[[eval]]")
    refuse_others(rest, OF_EVAL)
    args = env_args(options, rest)
    keys = [*rest, *given_keys(options, MODEL_KEYS), *given_keys(options, PLAY_KEYS)]
    said = merged(EvalFileConfig, keys, Draft(flags=options.flags))
    is_named = named or args or not {"eval", "ablation"}.isdisjoint(said.values)
    if options.resume is not None and not is_named:
        config = asked_again(EvalFileConfig, EVALUATIONS, _base(options), options, keys)
    else:
        config = load(EvalFileConfig, [], said).config
    if named and config.evals:
        raise ConfigError(f"environment {named!r} is named beside [[eval]] of a file; name it in one place")
    if not named and not config.evals:
        raise ConfigError("no environment is named; write quartet eval ENVIRONMENT, or [[eval]] in a file")
    if named:
        one = validate(OneEvalConfig, {"id": named, "args": args})
        return config.model_copy(update={"eval": (one,)})
    if args:
        raise ConfigError(
            "--env-args is for an environment named on the command line; write args in [[eval]]"
        )
    return config


def plan_of(config: EvalFileConfig, source: Source, options: argparse.Namespace) -> Plan:
    """Folders and what they hold. Raises ConfigError; changes nothing, but that a new name is taken."""
    base = _base(options)
    check_folder("--output-dir", base)
    folders = [base / folder_name(trial.name, source) for trial in config.trials]
    for trial, folder in zip(config.trials, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(
                f'two evaluations would fill {folder}; give {trial.name!r} another name = "..."'
            )
    one_run_id(options)
    run_id = options.run_id or options.resume or ""
    if options.resume == "" and not run_id:
        run_id = latest(folders, METADATA)
    if run_id and not is_run_id(run_id):
        raise ConfigError(f"--run-id {run_id!r} is refused: {RULE}")
    run_id = run_id or (DRY_RUN_ID if options.dry_run else new_run_id(base))
    records = []
    for folder, trial in zip(folders, config.trials, strict=True):
        if options.resume is None and (folder / run_id / METADATA).exists():
            raise ConfigError(
                f"{folder / run_id} is taken; add --resume {run_id}, or choose another --run-id"
            )
        records.append(Record(folder / run_id, trial, source))
    services = base / SERVICES / run_id / folders[0].name
    # What was ended before its environment had loaded has that alone.
    begun = [services / ASKED, *(one.folder / METADATA for one in records)]
    if options.resume is not None and not any(file.exists() for file in begun):
        raise ConfigError(f"--resume: no evaluation {run_id} of this environment and model in {base}")
    return Plan(source, records, services, run_id, options.output_dir)


def _base(options: argparse.Namespace) -> Path:
    folder: Path = options.output_dir.absolute() / "evals"
    return folder


def folder_name(name: str, source: Source) -> str:
    """As Verifiers calls it; what is too long for a folder ends with a digest of the rest."""
    text = for_a_folder(f"{name}--{source.name.strip('/')}")
    if len(text) <= MAX_FOLDER_CHARS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]
    return f"{text[: MAX_FOLDER_CHARS - DIGEST_CHARS - 2]}--{digest}"


async def evaluate(
    host: Any, policy: Player | None, records: Sequence[Record], tallies: Sequence[Tally], shown: Board
) -> None:
    """Play what the records do not have. Raises QuartetError, ConfigError."""
    # All of them first: what the last one is refused for is not told after the others were played.
    infos = [await describe(host, reference(record.trial)) for record in records]
    for record, info, tally in zip(records, infos, tallies, strict=True):
        await _evaluate(host, policy, record, info, tally, shown)


async def _evaluate(
    host: Any, policy: Player | None, record: Record, info: EnvironmentInfo, tally: Tally, shown: Board
) -> None:
    trial = record.trial
    tasks = await tasks_of(host, trial)

    def note(task: Task, rollout: Rollout) -> None:
        record.note(task, rollout)
        tally.add(rollout, failure_kind(rollout) if rollout.HasField("failure") else "")
        shown.update(tally)

    with record.held(info, tasks):
        wanted = record.wanted()
        total, left = len(tasks) * trial.rollouts_per_example, sum(map(len, wanted.values()))
        tally.begin(total, [row["reward"] for row in record.results])
        if left < total:
            shown.say(f"{trial.name}: {total - left} of {total} rollouts have results already")
        await play(host, trial, wanted, tasks, note, policy, whole_groups=info.group_scoring)


def report(plan: Plan) -> int:
    """Say what came out. The exit code."""
    print_table(result_table([(one.trial.name, one.summary(), one.failed) for one in plan.records]))
    for record in plan.records:
        metadata = record.metadata()
        # Of an earlier release's host one may be no number.
        means = "  ".join(
            f"{name} {'none' if value is None else f'{value:.3f}'}"
            for name, value in metadata["avg_metrics"].items()
        )
        figures = f"{record.trial.name}: {means}" if means else f"{record.trial.name}: no result"
        print(standard_streams.shown(figures))
        if record.why_nothing:
            print(standard_streams.shown(f"  {record.why_nothing}"))
        if len(metadata["policy_versions"]) > 1:
            print(f"  several versions of the policy answered: {metadata['policy_versions']}")
        cut = sum(row["is_truncated"] for row in record.results)
        if cut:
            print(f"  {cut} of {len(record.results)} were cut by a limit, such as sampling.max_tokens")
        print(f"  {record.folder}")
    failed = sum(sum(record.failed.values()) for record in plan.records)
    if failed:
        print(
            f"error: {failed} rollouts failed and have no reward; see failures.jsonl, "
            f"try them again with {plan.again}",
            file=sys.stderr,
        )
        return exits.FAILED
    return 0
