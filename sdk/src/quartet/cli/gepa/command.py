"""`quartet gepa`: a better system prompt for an environment, found by the `gepa` library.

1. Rollouts are played through `Interact` with the candidate's prompt in front, so any environment can be
   optimised, whatever its generation; the model is our inference or any endpoint, so is the teacher.
2. The library saves its state after every step: with --resume it goes on where it was, with equal settings,
   which need not be said again; only `max_calls` may be another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gepa.api import optimize

from quartet.cli.eval.arguments import (
    MODEL_KEYS,
    env_args,
    environment_first,
    given_keys,
    in_a_file,
    one_run_id,
)
from quartet.cli.eval.board import Board, PlainBoard
from quartet.cli.eval.command import folder_name
from quartet.cli.eval.config import Trial
from quartet.cli.eval.kept import (
    ASKED,
    OPTIMISATIONS,
    asked_again,
    check_same,
    keep,
    latest,
    put_back,
    refused,
)
from quartet.cli.eval.other_flags import OF_GEPA, refuse_others
from quartet.cli.eval.player import Player
from quartet.cli.eval.rollouts import describe, reference, tasks_of
from quartet.cli.eval.services import deploy, with_host
from quartet.cli.eval.source import Source, choose
from quartet.cli.gepa.adapter import COMPONENT, VALIDATION, Adapter
from quartet.cli.gepa.arguments import GEPA_KEYS, SAMPLING_KEYS
from quartet.cli.gepa.artefacts import BEST_ENV, BEST_PROMPT, METADATA, head, write_artefacts
from quartet.cli.gepa.config import KEPT, SETTINGS, GepaConfig
from quartet.cli.gepa.policies import Prompted, ReplicaPolicy
from quartet.cli.gepa.teacher import teacher_of
from quartet.cli.held import held, remove
from quartet.cli.outputs import PRIVATE, Row, write_json
from quartet.config import ConfigError, load
from quartet.config.load import Draft, merged
from quartet.config.text import read_text
from quartet.counted import counted
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.folder import check_folder
from quartet.local.beside import AddressBook
from quartet.local.supervisor import ServiceFailed
from quartet.local.toml_text import inline
from quartet.run.hosted import HostedConfig
from quartet.run.name import RULE, is_run_id
from quartet.v1.rollout_pb2 import Task

#: Columns of every rollout, beside metrics, rewards and the task's own fields.
ROW_COLUMNS = ("num_turns", "is_truncated", "stop_condition", "token_usage", "timing", "task_key", "prompt")


@dataclass(frozen=True)
class Plan:
    """What is to be done, all of it checked."""

    config: GepaConfig
    env: HostedConfig
    source: Source
    teacher: Source | None
    folder: Path
    run_id: str
    output_dir: Path

    @property
    def again(self) -> str:
        """The command that goes on with it."""
        return OPTIMISATIONS.again(self.run_id, self.output_dir)

    @property
    def trial(self) -> Trial:
        """One rollout of each example, as GEPA has it."""
        config = self.config
        return Trial(
            name=self.env.id, hosted=self.env, split="train", num_examples=config.num_train,
            rollouts_per_example=1, sampling=config.sampling, max_concurrent=config.max_concurrent,
        )  # fmt: skip

    @property
    def settings(self) -> Row:
        """What may not change on a resume, and max_calls, which may."""
        config = self.config.model_dump(mode="json")
        sampling = self.config.sampling.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return {
            "env_id": self.env.id,
            "env_args": self.env.args,
            "model": self.source.name,
            "base_url": self.source.base_url,
            "reflection_model": (self.teacher or self.source).name,
            "sampling_args": sampling,
            **{key: config[key] for key in (*KEPT, "max_calls")},
        }


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: an environment, `@ file.toml`, `--key value`."""
    plan = plan_of(read(options, rest), options)
    config, ids = plan.config, [plan.env.id]
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
            deploy(plan.source, Path(scratch), ids, config.envhost, config.inference)
        print(config.model_dump_json(indent=2, exclude_none=True))
        return 0
    refusal = f"{plan.folder} belongs to an optimisation that is going on; wait for it"
    is_new, asked_before = not plan.folder.exists(), None
    with held(plan.folder, refusal), contextlib.closing(PlainBoard()) as board:
        began_before = _began_at(plan)

        async def work(host: Any, policy: Player | None, book: AddressBook) -> tuple[Any, str]:
            return await _optimise(plan, host, policy, book, board)

        try:
            specs = deploy(plan.source, plan.folder / "services", ids, config.envhost, config.inference)
            asked_before = keep(plan.folder, config)
            board.say(f"run {plan.run_id} in {plan.folder}")
            result, api = with_host(specs, plan.source, work)
        except (ConfigError, KeyboardInterrupt, OSError, QuartetError, ServiceFailed) as error:
            is_refused, begun = isinstance(error, ConfigError), (plan.folder / METADATA).exists()
            if is_refused and not begun:  # what it is asked for is not to be had
                settle = remove if is_new else refused
                settle(plan.folder)
            if not isinstance(error, KeyboardInterrupt) and _began_at(plan) == began_before:
                put_back(plan.folder, asked_before)
            if (plan.folder / VALIDATION).exists() if is_refused else begun:
                print(f"what was done is kept; go on with {plan.again}", file=sys.stderr)
            raise
        return _report(plan, result, api)


def _began_at(plan: Plan) -> int:
    """When it last came so far that its environment was there; 0: never."""
    file = plan.folder / METADATA
    return file.stat().st_mtime_ns if file.exists() else 0


def _report(plan: Plan, result: Any, api: str) -> int:
    args = write_artefacts(plan.folder, result, plan.env, api, plan.settings)
    scores, best = result.val_aggregate_scores, result.best_idx
    print(
        f"reward {scores[0]:.3f} -> {scores[best]:.3f} on "
        f"{counted(len(result.val_subscores[0]), 'validation example')}, {counted(len(scores), 'candidate')} "
        f"kept, {counted(result.total_metric_calls, 'rollout')}"
    )
    if result.total_metric_calls <= len(result.val_subscores[0]):
        print(
            f"no other prompt was tried: candidate 0 took all of max_calls = {plan.config.max_calls}; "
            f"go on with a larger one: {plan.again} -B MORE"
        )
        return 0
    if best == 0:
        print("no prompt earned more than candidate 0, the one to begin with")
        return 0
    print(f"the best is candidate {best}: {plan.folder / BEST_PROMPT}")
    print(f"the line for [[env]] of a run (or @ {plan.folder / BEST_ENV}):")
    print(f"args = {inline(args)}")
    return 0


def read(options: argparse.Namespace, rest: list[str]) -> GepaConfig:
    """The configuration of the file, the flags and the environment named before them; where --resume is all
    that says what is optimised, what was asked for then, and its name in `options`. Raises ConfigError."""
    named, rest = environment_first(rest)
    refuse_others(rest, OF_GEPA)
    given = [one for keys in (MODEL_KEYS, GEPA_KEYS, SAMPLING_KEYS) for one in given_keys(options, keys)]
    if options.state_columns is not None:
        given.append(f"--state-columns={inline(options.state_columns)}")
    args = env_args(options, rest)
    if named:
        given.append(f"--env={in_a_file(named, args)}")
    elif args:
        raise ConfigError("--env-args is for an environment named on the command line; write env.args")
    keys = [*rest, *given]
    said = merged(GepaConfig, keys, Draft(flags=options.flags))
    env = said.values.get("env", {})
    if options.resume is not None and isinstance(env, dict) and "id" not in env:
        config = asked_again(GepaConfig, OPTIMISATIONS, _base(options), options, keys)
    else:
        config = load(GepaConfig, [], said).config
    if config.env is None:
        raise ConfigError("no environment is named; write quartet gepa ENVIRONMENT, or [env] in a file")
    return config


def plan_of(config: GepaConfig, options: argparse.Namespace) -> Plan:
    """Who answers, who reflects, and where to. Raises ConfigError; changes nothing."""
    assert config.env is not None
    source = choose(config, [config.env.timeout_seconds])
    teacher = teacher_of(config, source)
    _own_prompt(config)
    base = _base(options)
    check_folder("--output-dir", base)
    one_run_id(options)
    of_it = base / folder_name(config.env.id, source)
    run_id = options.resume or options.run_id or ""
    if options.resume == "" and not run_id:
        run_id = latest([of_it], METADATA)
    run_id = run_id or time.strftime("%Y%m%d-%H%M%S")
    if not is_run_id(run_id):
        raise ConfigError(f"--run-id {run_id!r} is refused: {RULE}")
    folder = of_it / run_id
    plan = Plan(config, config.env, source, teacher, folder, run_id, options.output_dir)
    known = folder / METADATA
    if options.resume is None and known.exists():
        raise ConfigError(f"{folder} is taken; add --resume {run_id}, or choose another --run-id")
    if options.resume is not None:
        # What was ended before its environment had loaded has that alone.
        if not known.exists() and not (folder / ASKED).exists():
            raise ConfigError(f"--resume {run_id}: there is no optimisation in {folder}")
        if known.exists():
            before = json.loads(known.read_text(encoding="utf-8"))["config"]
            check_same(SETTINGS, before, plan.settings, folder)
    return plan


def _base(options: argparse.Namespace) -> Path:
    folder: Path = options.output_dir.absolute() / "gepa"
    return folder


async def _optimise(
    plan: Plan, host: Any, policy: Player | None, book: AddressBook, board: Board
) -> tuple[Any, str]:
    """GEPA's result, and the environment's generation. Raises QuartetError, ConfigError."""
    trial, config = plan.trial, plan.config
    info = await describe(host, reference(trial))
    tasks = {
        split: await tasks_of(host, replace(trial, split=split, num_examples=count))
        for split, count in (("train", config.num_train), ("eval", config.num_val))
    }
    data = json.loads(tasks["train"][0].data_json)
    _check_columns(config.state_columns, [*info.rewards, *info.metrics, *data, *ROW_COLUMNS])
    initial = _initial_prompt(config, data)
    async with AsyncExitStack() as opened:
        if policy is None:
            addresses = plan.source.addresses or book["inference"]
            security = ClientSecurity.model_validate(config.envhost.get("inference_security", {}))
            policy = await opened.enter_async_context(ReplicaPolicy(addresses, security))
        teacher = policy
        if plan.teacher is not None:
            assert plan.teacher.player is not None
            teacher = await opened.enter_async_context(plan.teacher.player())
        adapter = Adapter(
            asyncio.get_running_loop(), host, trial, tasks, Prompted(policy), teacher, _named(plan),
            config.state_columns, config.reflection_max_tokens, board, plan.folder,
        )  # fmt: skip
        write_json(plan.folder / METADATA, head(plan.settings), PRIVATE)
        try:
            return await asyncio.to_thread(_run_library, plan, adapter, initial, tasks), info.api
        finally:
            if adapter.broken is not None:
                raise adapter.broken


def _named(plan: Plan) -> str:
    """The teacher, and where it is."""
    teacher = plan.teacher or plan.source
    return f"{teacher.name!r} at {teacher.base_url}" if teacher.base_url else repr(teacher.name)


def _run_library(plan: Plan, adapter: Adapter, initial: str, tasks: dict[str, list[Task]]) -> Any:
    """In a thread of its own: the library blocks."""
    config = plan.config
    with (plan.folder / "gepa.log").open("a", encoding="utf-8") as log:
        return optimize(
            seed_candidate={COMPONENT: initial},
            trainset=[("train", at) for at in range(len(tasks["train"]))],
            valset=[("eval", at) for at in range(len(tasks["eval"]))],
            adapter=adapter,  # type: ignore[arg-type]
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=config.minibatch_size,
            skip_perfect_score=config.perfect_score is not None,
            perfect_score=1.0 if config.perfect_score is None else config.perfect_score,
            max_metric_calls=config.max_calls,
            stop_callbacks=lambda state: adapter.broken is not None,
            callbacks=[adapter],  # type: ignore[list-item]
            run_dir=str(plan.folder),
            logger=_Log(log),
            seed=config.seed,
            raise_on_exception=True,
        )


class _Log:
    """What the library has to say, in a file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def log(self, message: str) -> None:
        """One message."""
        print(message, file=self._file, flush=True)


def _initial_prompt(config: GepaConfig, data: Row) -> str:
    """The file's, or the environment's own: of its task, or of its first message. Raises ConfigError."""
    if (own := _own_prompt(config)) is not None:
        return own
    messages = data.get("prompt")
    first = messages[0] if isinstance(messages, list) and messages else {}
    prompt = data.get(COMPONENT) or (first.get("content") if first.get("role") == "system" else None)
    if not prompt:
        raise ConfigError(
            "the environment has no system prompt to begin with; give one with --initial-prompt FILE"
        )
    return str(prompt)


def _own_prompt(config: GepaConfig) -> str | None:
    """What the file of the configuration says. Raises ConfigError."""
    if config.initial_prompt is None:
        return None
    return read_text(config.initial_prompt, f"initial_prompt = {str(config.initial_prompt)!r}")


def _check_columns(asked: Sequence[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(set(known)))}"
            raise ConfigError(f"state_columns: a rollout has no {name!r}; {remedy}")
