"""Admission of runs: everything that can be refused before a run exists, in one sentence each."""

from __future__ import annotations

import re

from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.run.config import RunConfig, parse_run
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.prompts import CYCLE
from quartet_orchestrator.requests import environment_ref

RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_run_id(run_id: str) -> None:
    # "." and ".." would be names of other folders than the run's.
    if not RUN_ID.fullmatch(run_id) or set(run_id) == {"."}:
        raise QuartetError(
            "INVALID_REQUEST",
            f"run_id {run_id!r} is refused: use 1 to 64 of A-Z a-z 0-9 _ . -, not dots alone",
            field="run_id",
            value=run_id,
            remedy="choose another name",
        )


def parse(config_toml: str) -> RunConfig:
    try:
        config = parse_run(config_toml)
    except ConfigError as error:
        raise QuartetError(
            "INVALID_CONFIG", str(error), key=error.key, value=error.value, remedy=error.remedy
        ) from None
    if len(config.env) > CYCLE:
        _refuse("env", len(config.env), f"use at most {CYCLE} environments")
    advantage = config.algorithm.advantage
    if advantage != "none" and config.rollouts_per_example < 2:
        _refuse(
            "rollouts_per_example",
            1,
            f'advantage = "{advantage}" compares rollouts of one task; set at least 2',
        )
    if advantage == "dr_grpo" and config.sampling.max_tokens is None:
        _refuse("sampling.max_tokens", "unset", 'advantage = "dr_grpo" divides by it; set it')
    return config


async def describe_environments(config: RunConfig, hosts: EnvHosts) -> list[EnvironmentInfo]:
    """Each environment as its host describes it, with something to train and to evaluate on."""
    found = []
    for env in config.env:
        info = await hosts.describe(environment_ref(env))
        if not info.infinite and info.train_size == 0:
            _refuse("env.id", env.id, "it has no training examples; choose another environment or other args")
        if config.eval.num_examples > 0 and info.eval_size == 0:
            _refuse(
                "eval.num_examples",
                config.eval.num_examples,
                f"{env.id!r} has no evaluation examples; set it to 0",
            )
        found.append(info)
    return found


def _refuse(key: str, value: object, remedy: str) -> None:
    raise QuartetError(
        "INVALID_CONFIG", f"{key} = {value} is refused: {remedy}", key=key, value=value, remedy=remedy
    )
