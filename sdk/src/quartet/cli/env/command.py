"""`quartet env init | install | list | show | check`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from quartet.cli import exits
from quartet.cli.env.arguments import CHECK_DEFAULTS
from quartet.cli.env.catalogue import catalogue, catalogue_table, info_lines, interpreters
from quartet.cli.env.checking import Played, play_by_model, play_by_oracle, played_lines, problems
from quartet.cli.env.conversation import conversation_lines
from quartet.cli.env.install import install
from quartet.cli.env.installed import candidates, module_of, python_of
from quartet.cli.env.oracle import Oracle, find_oracle
from quartet.cli.env.package import package
from quartet.cli.env.scaffold import write_package
from quartet.cli.env.under_way import UnderWay, telling
from quartet.cli.eval.arguments import MODEL_KEYS, PLAY_KEYS, env_args, given_keys
from quartet.cli.eval.board import print_table
from quartet.cli.eval.config import EvalFileConfig, OneEvalConfig
from quartet.cli.eval.player import Nobody, Player
from quartet.cli.eval.rollouts import describe, reference, tasks_of
from quartet.cli.eval.services import deploy, with_host
from quartet.cli.eval.source import Source, choose
from quartet.cli.other_commands import instead
from quartet.config import ConfigError, load, validate
from quartet.config.load import Draft
from quartet.local.beside import AddressBook
from quartet.run.hosted import BUILT_IN

ORACLE = "oracle"


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: keys of `quartet eval`."""
    if rest and options.env_command not in ("show", "check"):
        command = f"env {options.env_command}"
        meant = instead(command, rest[0]) or f"see 'quartet {command} --help'"
        raise ConfigError(f"argument {rest[0]!r} is not understood; {meant}")
    match options.env_command:
        case "init":
            folder = write_package(options.name, options.path, options.kind)
            print(f"{folder} is written; next: quartet env install {shlex.quote(str(folder))}")
        case "install":
            asked = package(options.package, options.index_url, options.extra_index_url)
            python = install(asked, options.generation, options.into)
            looked_at = python in (one.absolute() for one in candidates(asked.name))
            named = "" if looked_at else f" --envhost.python {python}"
            print(f"{asked.name} is installed in {python}; next: quartet env check {asked.name}{named}")
        case "list":
            found = catalogue(interpreters(options.python))
            print_table(catalogue_table(found)) if found else print("no environment is installed here")
        case "show":
            return _show(options, rest)
        case "check":
            return _check(options, rest)
    return 0


def _config(options: argparse.Namespace, keys: list[str]) -> EvalFileConfig:
    args = env_args(options, keys)
    config = load(EvalFileConfig, keys, Draft(flags=options.flags)).config
    # What fails is told as it was, and not tried again: a reward that hangs takes a minute each time.
    table = {"id": options.environment, "args": args, "max_retries": 0}
    one = validate(OneEvalConfig, table)
    return config.model_copy(update={"eval": (one,)})


def _show(options: argparse.Namespace, rest: list[str]) -> int:
    config = _config(options, [*rest, "--num-examples=1", "--split=train"])
    (trial,) = config.trials

    async def work(host: Any, policy: Player | None, book: AddressBook) -> list[str]:
        info = await describe(host, reference(trial))
        (task, *_) = await tasks_of(host, trial)
        return info_lines(info, python, json.loads(task.data_json))

    python = python_of(config.envhost, options.environment)
    nobody = Source("nobody", player=Nobody)
    with tempfile.TemporaryDirectory(prefix="quartet-env-") as folder:
        specs = deploy(nobody, Path(folder), [options.environment], config.envhost, {})
        with telling(UnderWay(f"loading {options.environment}")):
            lines = with_host(specs, nobody, work)
    print("\n".join(lines))
    return 0


def _check(options: argparse.Namespace, rest: list[str]) -> int:
    """Rewards, failures, times, tokens; exit code 1 where it does not pass."""
    if options.full_reward is not None and not 0 < options.full_reward < math.inf:
        raise ConfigError(f"--full-reward {options.full_reward:g} is refused; give what a right answer earns")
    given = [*given_keys(options, MODEL_KEYS), *given_keys(options, PLAY_KEYS)]
    config = _config(options, [*CHECK_DEFAULTS, *rest, *given])
    source = _player(config, options.environment)
    full = options.full_reward or 1.0
    under_way = UnderWay(f"loading {options.environment}")
    (trial,) = config.trials

    async def work(host: Any, policy: Player | None, book: AddressBook) -> list[Played]:
        nonlocal full
        if isinstance(policy, Oracle):
            full = options.full_reward or policy.full_reward
            return await play_by_oracle(host, trial, policy, under_way)
        return await play_by_model(host, trial, policy, source.name, under_way)

    with tempfile.TemporaryDirectory(prefix="quartet-env-") as folder:
        specs = deploy(source, Path(folder), [options.environment], config.envhost, config.inference)
        with telling(under_way):
            played = with_host(specs, source, work)
    by_model = source.name != ORACLE
    for one in played:
        print("\n".join(played_lines(one, tokens=by_model)))
        if by_model:
            print("\n".join(conversation_lines(one)))
    found = problems(played, full)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print(f"{options.environment} passes")
    return exits.FAILED if found else 0


def _player(config: EvalFileConfig, env_id: str) -> Source:
    """The model that is named, else the environment's oracle. Raises ConfigError."""
    if config.model or config.inference_addresses:
        return choose(config, config.rollout_seconds)
    module, python = module_of(env_id), python_of(config.envhost, env_id)
    if module in BUILT_IN:
        raise ConfigError(f"{env_id!r} has no oracle, a service rewards its answers; name a model with -m")
    oracle, there = find_oracle(module, python)
    if not there:
        where = f"{oracle.replace('.', '/')}.py" + ("" if "." in oracle else f" beside {module}.py")
        raise ConfigError(
            f"{env_id!r} has no oracle ({where}, with answer(task, messages)); "
            "write one, or name a model with -m"
        )
    return Source(ORACLE, player=lambda: Oracle(oracle, python))
