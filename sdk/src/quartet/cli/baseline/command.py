"""`quartet baseline`: the environments of a run, played as training would play them, and judged."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.cli import exits
from quartet.cli.baseline.arguments import SAMPLING_KEYS
from quartet.cli.baseline.verdict import FIT, Setting, Verdict, judge
from quartet.cli.env.installed import module_of, python_of
from quartet.cli.env.oracle import full_reward_of
from quartet.cli.eval.arguments import env_args, environment_first, given_keys, in_a_file
from quartet.cli.eval.board import Tally, board, print_table, result_table
from quartet.cli.eval.command import evaluate, folder_name
from quartet.cli.eval.config import Trial
from quartet.cli.eval.kept import SERVICES, new_run_id
from quartet.cli.eval.player import Player
from quartet.cli.eval.record import Record
from quartet.cli.eval.services import deploy, with_host
from quartet.cli.eval.source import Source, source_of
from quartet.cli.outputs import write_json
from quartet.cli.run_file import load_run
from quartet.config import ConfigError
from quartet.counted import counted
from quartet.errors import QuartetError
from quartet.kit.folder import check_folder
from quartet.local.beside import AddressBook
from quartet.local.supervisor import ServiceFailed
from quartet.run.config import RunConfig
from quartet.run.hosted import MAX_GROUP, HostedConfig
from quartet.run.sampling import measured_as

VERDICTS = "baseline.json"


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: an environment, `@ file.toml`, `--key value` of the run."""
    config = read(options, rest)
    planned = trials(options, config)
    source = _source(options, config)
    base = options.output_dir.absolute() / "baselines"
    check_folder("--output-dir", base)
    full = _full_rewards(options.full_reward, config)
    run_id = new_run_id(base)
    records = [Record(base / folder_name(trial.name, source) / run_id, trial, source) for trial in planned]
    services = base / SERVICES / run_id
    ids = [env.id for env in config.env]
    inference = dict(config.inference) if source.folder else {}
    specs = deploy(source, services, ids, config.envhost, inference)
    _play(records, options, specs, source)
    return report(records, full)


def _full_rewards(given: float | None, config: RunConfig) -> dict[str, float]:
    """What a right answer earns in each environment; where nobody gave it, as its oracle says."""
    ids = {env.id for env in config.env}
    return {
        one: given or full_reward_of(module_of(one), python_of(config.envhost, one)) for one in sorted(ids)
    }


def _play(records: Sequence[Record], options: argparse.Namespace, specs: Any, source: Source) -> None:
    tallies = [Tally(record.trial.name) for record in records]
    with contextlib.closing(board(tallies, plain=options.plain)) as shown:

        async def work(host: Any, policy: Player | None, book: AddressBook) -> None:
            await evaluate(host, policy, records, tallies, shown)

        try:
            with_host(specs, source, work)
        except (KeyboardInterrupt, OSError, QuartetError, ServiceFailed):
            for one in records:
                if found := len(one.results):
                    print(
                        f"{one.trial.name}: {counted(found, 'result')} kept in {one.folder}", file=sys.stderr
                    )
            raise


def read(options: argparse.Namespace, rest: list[str]) -> RunConfig:
    """The run. Raises ConfigError."""
    named, rest = environment_first(rest)
    args = env_args(options, rest)
    if args and not named:
        raise ConfigError("--env-args is for an environment named on the command line; write args in [[env]]")
    given = given_keys(options, SAMPLING_KEYS)
    if options.key_model is not None:
        given.append(f"--model={options.key_model}")
    if named:
        given.append(f"--env=[{in_a_file(named, args)}]")
    # Replicas have a model; what a file or an option says of it, for the name of the folder, comes after.
    served = [f"--model={address}" for address in options.inference_address[:1]]
    return load_run([*served, *rest, *given], flags=options.flags).config


def trials(options: argparse.Namespace, config: RunConfig) -> list[Trial]:
    """One for each environment of the run. Raises ConfigError."""
    asked = options.rollouts_per_example
    group = config.rollouts_per_example if asked is None else asked
    for flag, value, most in (
        ("--num-examples", options.num_examples, 2**32),
        ("--rollouts-per-example", group, MAX_GROUP),
        ("--max-concurrent", options.max_concurrent, 2**32),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} {value} is refused; give 1 to {most}")
    if options.full_reward is not None and not 0 < options.full_reward < math.inf:
        raise ConfigError(f"--full-reward {options.full_reward:g} is refused; give what a right answer earns")
    return [
        Trial(
            name=env.label,
            hosted=HostedConfig.model_validate(env.model_dump(exclude={"weight", "name", "sampling"})),
            split="train",
            num_examples=options.num_examples,
            rollouts_per_example=group,
            sampling=measured_as(config.sampling_of(env)),
            max_concurrent=options.max_concurrent,
        )
        for env in config.env
    ]


def _source(options: argparse.Namespace, config: RunConfig) -> Source:
    if options.inference_address:
        return Source(config.model, addresses=options.inference_address)
    return source_of(
        config.model,
        options.key_base_url or "",
        options.key_api_key_var or "OPENAI_API_KEY",
        Path(options.key_endpoints or "configs/endpoints.toml"),
        [env.timeout_seconds for env in config.env],
    )


def report(records: Sequence[Record], full_rewards: Mapping[str, float]) -> int:
    """Say the verdicts, and write them. The exit code.

    `full_rewards` says by an environment's id what a right answer earns in it.
    """
    verdicts = [verdict_of(record, full_rewards[record.trial.hosted.id]) for record in records]
    for record, verdict in zip(records, verdicts, strict=True):  # first: perhaps nobody reads what is said
        failed = sum(record.failed.values())
        write_json(
            record.folder / VERDICTS,
            {"verdict": verdict.word, "why": verdict.why, "advice": list(verdict.advice), "failed": failed},
        )
    print_table(result_table([(one.trial.name, one.summary(), one.failed) for one in records]))
    fit = True
    for record, verdict in zip(records, verdicts, strict=True):
        failed = sum(record.failed.values())
        fit = fit and verdict.word == FIT and not failed
        print(f"{record.trial.name}: {verdict.word}. {verdict.why}.")
        for line in verdict.advice:
            print(f"  - {line}")
        if failed:
            print(f"  - {failed} rollouts failed and count as nothing here; see failures.jsonl")
        print(f"  {record.folder}")
    return 0 if fit else exits.FAILED


def verdict_of(record: Record, full_reward: float) -> Verdict:
    """Of what the record holds."""
    figures = record.summary()
    if figures is None:
        return Verdict("unclear", "no rollout has a result", ["see what failed: quartet env check"])
    sampling = record.trial.sampling
    setting = Setting(
        record.trial.hosted.id,
        record.trial.rollouts_per_example,
        1.0 if sampling.temperature is None else sampling.temperature,
        sampling.max_tokens,
        full_reward,
    )
    cut = sum(row["is_truncated"] for row in record.results) / len(record.results)
    return judge(figures, cut, setting)
