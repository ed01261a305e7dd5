"""Admission of runs: everything that can be refused before a run exists, in one sentence each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quartet import trainable
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.run import evaluation
from quartet.run.algorithm import AlgorithmConfig
from quartet.run.config import RunConfig, parse_run
from quartet.run.evaluation import EvalTrial, EvaluateConfig
from quartet.run.hosted import HostedConfig
from quartet.run.name import RULE, is_run_id
from quartet.v1.common_pb2 import ChatIdentity
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

from quartet_orchestrator import chats
from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.outage import AWAY
from quartet_orchestrator.policies import Policies
from quartet_orchestrator.requests import environment_ref
from quartet_orchestrator.specs import custom_args, publishes_adapters, run_spec
from quartet_orchestrator.teacher import Teachers
from quartet_orchestrator.trainer_client import CHECK_S, TrainerClient

C = TypeVar("C")


def check_run_id(run_id: str) -> None:
    """Refuses a name that a run may not have. Raises INVALID_REQUEST."""
    if not is_run_id(run_id):
        raise QuartetError(
            "INVALID_REQUEST",
            f"run_id {run_id!r} is refused: {RULE}",
            field="run_id",
            value=run_id,
            remedy="choose another name",
        )


def parse(config_toml: str) -> RunConfig:
    """The configuration of a run. Raises INVALID_CONFIG."""
    return _parsed(parse_run, config_toml)


def parse_evaluation(config_toml: str) -> EvaluateConfig:
    """What an evaluation on demand is to measure. Raises INVALID_CONFIG."""
    return _parsed(evaluation.parse_evaluation, config_toml)


def _parsed(parser: Callable[[str], C], config_toml: str) -> C:
    try:
        return parser(config_toml)
    except ConfigError as error:
        raise QuartetError(
            "INVALID_CONFIG", str(error), key=error.key, value=error.value, remedy=error.remedy
        ) from None


@dataclass(frozen=True)
class Environments:
    """As their hosts describe them, in the order of the configuration."""

    train: list[EnvironmentInfo]
    #: Empty where the evaluations use those above.
    eval: list[EnvironmentInfo]


async def describe_environments(config: RunConfig, hosts: EnvHosts) -> Environments:
    """Each environment, with something to train on and to evaluate on."""
    train = await _described(config.env, hosts)
    for env, info in zip(config.env, train, strict=True):
        if not info.infinite and info.train_size == 0:
            raise refusal(
                "env.id", env.label, "it has no training examples; choose another environment or other args"
            )
        _check_group("rollouts_per_example", config.rollouts_per_example, env.label, info)
    _check_weights(config.algorithm, train)
    own = await _described(config.eval.env, hosts)
    # There are no trials where nothing is evaluated.
    for number, (trial, info) in enumerate(zip(config.trials, own or train, strict=bool(config.trials))):
        if info.eval_size == 0:
            raise refusal(
                "eval.num_examples",
                trial.num_examples,
                f"{trial.name!r} has no evaluation examples; set it to 0"
                + (f", or remove {trial.name!r} from eval.env" if own else ", or give eval.env others"),
            )
        is_its_own = own and config.eval.env[number].rollouts_per_example is not None
        table = f"eval.env.{number}" if is_its_own else "eval"
        _check_group(f"{table}.rollouts_per_example", trial.rollouts_per_example, trial.name, info)
    return Environments(train, own)


def _check_group(key: str, members: int, environment: str, info: EnvironmentInfo) -> None:
    """Whether its host takes a group of so many, where it tells."""
    if 0 < info.max_members < members:
        limits = "rollouts_per_worker, max_in_flight" if info.group_scoring else "max_in_flight"
        raise refusal(
            key,
            members,
            f"the host of {environment!r} takes groups of at most {info.max_members}; set it to that, or "
            f"raise what limits the host ({limits})",
        )


def _check_weights(algorithm: AlgorithmConfig, environments: Sequence[EnvironmentInfo]) -> None:
    """Whether each is of a reward function that some environment has, and a penalty of theirs has one, where
    they tell."""
    weights = algorithm.reward_weights
    told = [set(info.rewards) for info in environments]
    known = sorted(set().union(*told))
    for name, weight in weights.items():
        if all(told) and name not in known:
            key = f"algorithm.reward_weights.{name}"
            raise refusal(key, weight, f"the reward functions are {', '.join(known)}; name one of them")
    if algorithm.advantage != "gdpo":
        return
    for info in environments:
        unsaid = {name: w for name, w in sorted(info.weights.items()) if w < 0 and name not in weights}
        if unsaid:
            names = ", ".join(map(repr, unsaid))
            say = ", ".join(f"{json.dumps(name)} = {weight:g}" for name, weight in unsaid.items())
            raise refusal(
                "algorithm.advantage",
                '"gdpo"',
                f"{info.id!r} has a negative weight for {names}, and gdpo reads algorithm.reward_weights "
                f"alone, where what is left out weighs 1: it would train for a penalty; write {say} there, "
                "or another weight",
            )


def check_trainer(config: RunConfig, has_trainer: bool, has_policies: bool) -> None:
    """Whether somebody trains the run, and its versions can be seen."""
    external = config.external_trainer
    if not external and not has_trainer:
        raise refusal(
            "external_trainer", external, "this orchestrator has no trainer_address; set it to true"
        )
    if external and not has_policies:
        raise refusal(
            "external_trainer",
            external,
            "this orchestrator sees no version that is pushed; give it inference_addresses",
        )


async def check_teacher(config: RunConfig, teachers: Teachers, policies: Policies) -> None:
    """Whether the service that is asked for a reference's log-probabilities can be, and has not the policy
    itself. Raises INVALID_CONFIG."""
    reference, key = config.algorithm.reference, "algorithm.reference.address"
    if reference is None or reference.address is None:
        return
    try:
        teachers.check(reference.address)
    except ConfigError as error:
        raise refusal(key, repr(reference.address), str(error)) from None
    # What names no run is answered by the base model where the policy is an adapter upon it.
    if not publishes_adapters(config) and await policies.has(reference.address):
        raise refusal(
            key,
            repr(reference.address),
            "it is a replica that serves this run (inference_addresses of the orchestrator), so the "
            "reference would be the policy itself; name an inference service of its own that serves the "
            "other model, or let the trainer hold it (algorithm.reference.model)",
        )


async def check_at_trainer(
    config: RunConfig, trainer: TrainerClient | None, policies: Policies | None = None
) -> str:
    """Whether the trainer has the model and the loss, and the model what is to be replayed. A trainer that is
    away, slow, or of a release that does not say is no reason to refuse a run: it waits for it, and ends with
    the reason. What a person should know: that, or what of the model is otherwise at the replicas (chats.py),
    and whether batches may become too large for it.
    Raises INVALID_CONFIG."""
    if config.external_trainer or trainer is None:
        return ""
    asked = asyncio.create_task(policies.chats() if policies is not None else _nobody())
    try:
        checked = await trainer.check(
            run_spec(config),
            config.algorithm.custom or "",
            custom_args(config),
            config.ckpt.most_states(config.max_steps),
        )
        if config.algorithm.router_replay and checked.HasField("has_routers") and not checked.has_routers:
            model = f"the model {config.model!r} has no routers to replay"
            raise refusal("algorithm.router_replay", True, f"{model}; leave it out")
        told = (chats.warning(checked.chat, await asked), _may_outgrow(config))
        return "; ".join(filter(None, told))
    except QuartetError as error:
        if error.reason == "INVALID_CONFIG":
            raise
        if error.reason in AWAY:
            # It may be there, and look for a hub id over a slow network.
            away = f"had not answered within {CHECK_S:g} s" if error.reason == "DEADLINE" else "was away"
            return (
                f"the trainer at {trainer.address} {away} when the run was submitted ({error.message}): "
                "whether it has the model is seen when the run begins"
            )
    finally:
        asked.cancel()
    return ""


def _may_outgrow(config: RunConfig) -> str:
    """What is said of a batch that the trainer takes only as long as answers are shorter than they may be."""
    longest, parts = config.longest_answer or 0, config.algorithm.num_minibatches
    tokens = config.batch_size // parts * longest
    size = trainable.call_bytes(tokens, tokens, referenced=config.algorithm.has_teacher)
    if size <= trainable.MAX_CALL_BYTES:
        return ""
    return (
        f"batch_size = {config.batch_size} answers of sampling.max_tokens = {longest} are more than the "
        f"trainer takes at once ({trainable.MAX_CALL_BYTES >> 20} MiB): a run whose answers grow to that "
        f"cannot go on; lower one of the two, or raise algorithm.num_minibatches (now {parts})"
    )


async def _nobody() -> dict[str, ChatIdentity]:
    return {}


async def describe_trials(trials: Sequence[EvalTrial], hosts: EnvHosts) -> list[EnvironmentInfo]:
    """The environments of an evaluation that is asked for by itself, each with something to evaluate on."""
    infos = await _described([trial.hosted for trial in trials], hosts)
    for trial, info in zip(trials, infos, strict=True):
        if info.eval_size == 0:
            raise refusal("env.id", trial.name, "it has no evaluation examples; name another environment")
        _check_group("rollouts_per_example", trial.rollouts_per_example, trial.name, info)
    return infos


async def _described(environments: Sequence[HostedConfig], hosts: EnvHosts) -> list[EnvironmentInfo]:
    """Side by side: each is loaded first."""
    return await asyncio.gather(*(hosts.describe(environment_ref(env)) for env in environments))


def refusal(key: str, value: object, remedy: str) -> QuartetError:
    """The INVALID_CONFIG of one key, for the caller to raise."""
    said = str(value).lower() if isinstance(value, bool) else value  # as TOML has it
    return QuartetError(
        "INVALID_CONFIG", f"{key} = {said} is refused: {remedy}", key=key, value=said, remedy=remedy
    )
