"""`quartet submit | watch | evaluate | runs | stop | resume`: thin clients of an orchestrator that is
elsewhere (quartet.cli.reaching)."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from quartet.cli.checked import doubts
from quartet.cli.eval.arguments import Keys, given_keys
from quartet.cli.evaluation_file import read_evaluation
from quartet.cli.follow import watch
from quartet.cli.progress import ENDED, phase_name
from quartet.cli.rounded import rounded
from quartet.cli.run_file import load_run
from quartet.cli.submitted import submitted
from quartet.config import ConfigError, load
from quartet.config.load import Draft
from quartet.errors import QuartetError
from quartet.kit.build import Build, build_of
from quartet.kit.call import RetryBudget, stream, unary
from quartet.kit.standard_streams import say, shown
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.local.toml_text import dumps
from quartet.local.wiring import SERVICES
from quartet.run.config import SHOWN, RunConfig
from quartet.run.evaluation import EvaluateConfig
from quartet.run.name import RULE, is_run_id
from quartet.v1.orchestrator_service_pb2 import (
    RUN_PHASE_COMPLETED,
    RUN_PHASE_FAILED,
    RUN_PHASE_STOPPED,
    RUN_PHASE_STOPPING,
    EvalEvent,
    EvaluateRequest,
    GetRunStatusRequest,
    ListRunsRequest,
    ListRunsResponse,
    ResumeRunRequest,
    Run,
    RunAgent,
    RunEnvironment,
    ServiceStatus,
    StopRunRequest,
)
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

__all__ = ["evaluate", "resume", "runs", "stop", "submit", "watch"]

CALL_SECONDS = 30.0
#: How often a run that is being stopped is looked at.
LOOK_SECONDS = 1.0
#: What it waits for is told at once, once more after so long, and whenever that time has doubled.
AGAIN_SECONDS = 10.0
#: Options of `quartet rl` that are about its own folder, screen and services.
OF_RL = ("--output-dir", "--resume", "--overwrite", "--plain", "--trainer-gpus", "--inference-gpus")
#: Keys of services' tables by which a run is another one. What else is in them is how a machine computes, and
#: where: services that run already have that of their own, and a file for `quartet rl` on one machine has it.
COUNTED_ON = {
    "trainer": {"deterministic", "losses"},
    "orchestrator": {"advantages"},
    "inference": {"chat", "max_model_len", "routed_experts"},
    "envhost": {"environments"},
}
#: How a replica of inference stands that nobody has given weights to.
WAITING = "idle, serves from a run's first version on"

#: A run that is submitted once more and rests goes on resting: how it stands, and what goes on with it.
_HOW_IT_RESTS = {
    RUN_PHASE_STOPPED: "STOPPED: 'quartet resume {0}' goes on with it",
    RUN_PHASE_FAILED: "FAILED: 'quartet resume {0}' begins it again, where it failed before it sampled; "
    "another --run-id begins anew",
    RUN_PHASE_COMPLETED: "COMPLETED: a larger max_steps goes on with it, another --run-id begins anew",
}

#: As of `quartet eval`; what is left out is the run's, or the default here.
EVALUATE_KEYS: Keys = {
    ("-n", "--num-examples"): ("num_examples", "examples of each environment; -1 for all (default: 64)"),
    ("-r", "--rollouts-per-example"): ("rollouts_per_example", "rollouts of each example (default: 1)"),
    ("-c", "--max-concurrent"): ("max_concurrent", "rollouts under way at once (default: 32)"),
    ("-t", "--max-tokens"): ("sampling.max_tokens", "most tokens of a turn (default: the run's)"),
    ("-T", "--temperature"): ("sampling.temperature", "0 is greedy (default: the run's)"),
}


async def submit(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """Check the run here, then hand it over."""
    for token in rest:
        if (option := token.partition("=")[0].replace("_", "-")) in OF_RL:
            raise ConfigError(f"{option} is an option of quartet rl, for a run on this machine; leave it out")
    if options.run_id is not None and not is_run_id(options.run_id):
        raise ConfigError(f"--run-id {options.run_id!r} is refused: {RULE}")
    found = load_run(rest, starts_services=False, flags=options.flags)
    _leave_services_alone(found.config, found.options, is_trial=options.dry_run)
    for sentence in doubts(found.config):
        say(sentence, sys.stderr)
    run_id = options.run_id or time.strftime("run-%Y%m%d-%H%M%S")
    not_sent = _not_sent(found.config)
    try:
        answer = await submitted(stub, run_id, found.config, but=not_sent, dry_run=options.dry_run)
    except QuartetError as error:
        if error.reason != "RUN_CONFLICT":
            raise
        raise ConfigError(error.message.replace("another run_id", "another --run-id")) from error
    if options.dry_run:
        print(f"{run_id} would be accepted; not submitted")
    else:
        print(run_line(answer.run))
        _say_who_shows_it(found.config, run_id)
    if answer.run.phase in ENDED and answer.run.max_steps == found.config.max_steps:
        say(f"run {run_id!r} was there and is {_HOW_IT_RESTS[answer.run.phase].format(run_id)}", sys.stderr)
    return 0


def _not_sent(config: RunConfig) -> set[str]:
    """[wandb] and [mlflow] go along where they say something, for `quartet watch --wandb`."""
    said = {"wandb"} if config.wandb.project else set()
    return {*SERVICES, *SHOWN} - said - ({"mlflow"} if config.mlflow.experiment else set())


def _say_who_shows_it(config: RunConfig, run_id: str) -> None:
    """Where a run is shown, whoever follows it shows it: no service does."""
    wanted = {
        "wandb": config.wandb.project is not None,
        "mlflow": config.mlflow.experiment is not None,
        "tensorboard": config.tensorboard.enabled,
    }
    tables = [name for name, is_wanted in wanted.items() if is_wanted]
    if tables:
        flags = " ".join(f"--{name}" for name in tables)
        print(
            f"[{'], ['.join(tables)}]: whoever follows the run reports it there; write 'quartet watch "
            f"{run_id} {flags}'",
            file=sys.stderr,
        )


def _leave_services_alone(config: RunConfig, rest: Sequence[str], *, is_trial: bool) -> None:
    """Say what of the run is for services that are running already: in a trial all of it, else what the run
    may count on. Errors: ConfigError."""
    for token in rest:
        service = token.removeprefix("--").partition(".")[0]
        if token.startswith("--") and service in SERVICES:
            raise ConfigError(
                f"{token.partition('=')[0]} is a setting of the {service} service, which is running already; "
                "set it where that is started"
            )
    tables = {name: getattr(config, name) for name in SERVICES}
    unread = [
        f"[{name}]"
        for name, table in tables.items()
        if (table if is_trial else COUNTED_ON[name] & {key.replace("-", "_") for key in table})
    ]
    if unread:
        print(f"not read, the services are running already: {', '.join(unread)}", file=sys.stderr)
    if config.keep_rollouts is not None:
        print(
            "not read, whoever watches the run records it: keep_rollouts; give that --keep-rollouts",
            file=sys.stderr,
        )


async def runs(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """All runs, newest first; and of the services what somebody has to see to, or all of it."""
    answer = await _listed(stub)
    if not answer.runs:
        print("there is no run: none was submitted yet, or all were deleted", file=sys.stderr)
    for one in answer.runs:
        print(run_line(one))
        for environment in one.environments if options.environments else ():
            print(f"  {environment_line(environment)}")
    if options.services:
        is_idle = all(one.phase in ENDED for one in answer.runs)
        for service in answer.services:
            print(service_line(service, is_idle=is_idle))
        return 0
    for said in worth_seeing(answer.services):
        print(said, file=sys.stderr)
    return 0


async def _listed(stub: OrchestratorServiceStub) -> ListRunsResponse:
    response: ListRunsResponse
    for request in (ListRunsRequest(services=True), ListRunsRequest()):
        try:
            response = await unary(stub.ListRuns, request, timeout_s=CALL_SECONDS, budget=RetryBudget())
        except QuartetError as error:
            if error.reason != "NOT_IMPLEMENTED" or not request.services:
                raise
            continue  # an earlier release, which cannot say
        break
    return response


async def stop(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """Stop after the step under way."""
    request = StopRunRequest(run_id=options.run)
    answer = await unary(stub.StopRun, request, timeout_s=CALL_SECONDS, budget=RetryBudget())
    print(run_line(answer.run))
    return 0


async def resume(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """Go on with a stopped run, once a stop under way is over."""
    await _stopped(stub, options.run)
    request = ResumeRunRequest(run_id=options.run)
    answer = await unary(stub.ResumeRun, request, timeout_s=CALL_SECONDS, budget=RetryBudget())
    print(run_line(answer.run))
    return 0


async def _stopped(stub: OrchestratorServiceStub, run_id: str) -> None:
    """Returns once the run is not STOPPING; what that waits for is told ever more seldom. What hangs, the
    orchestrator ends."""
    request, began, due_s = GetRunStatusRequest(run_id=run_id), time.monotonic(), 0.0
    while True:
        answer = await unary(stub.GetRunStatus, request, timeout_s=CALL_SECONDS, budget=RetryBudget())
        if answer.run.phase != RUN_PHASE_STOPPING:
            return
        if time.monotonic() - began >= due_s:
            due_s = max(2 * due_s, AGAIN_SECONDS)
            does = f" ({shown(answer.run.doing)})" if answer.run.doing else ""
            say(f"run {run_id!r} is STOPPING{does}; it goes on once that is over", sys.stderr)
        await asyncio.sleep(LOOK_SECONDS)


async def evaluate(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """Measure what the run's policy earns now; 0 where every rollout has a result."""
    keys = [*rest, *given_keys(options, EVALUATE_KEYS)]
    asked = load(EvaluateConfig, keys, Draft(flags=options.flags, read=read_evaluation)).config
    # What was not said is the run's to say.
    toml = dumps(asked.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    request = EvaluateRequest(run_id=options.run, config_toml=toml)
    result = EvalEvent()
    async for frame in stream(stub.Evaluate(request), idle_timeout_s=IDLE_TIMEOUT_SECONDS):
        if frame.HasField("result"):
            result = frame.result
    print(f"{options.run}  version {result.policy_version}, after step {result.step}")
    for name, value in sorted(result.metrics.items()):
        print(f"{shown(name)}  {rounded(value)}")
    return 0 if result.metrics["eval/coverage"] == 1 else 1


def service_line(one: ServiceStatus, *, is_idle: bool) -> str:
    """A service in one line; `is_idle`: no run goes on, so that a replica of inference has none to serve."""
    stands = shown(one.error) or "ready"
    if not one.error and not one.ready:
        stands = WAITING if is_idle and one.service == "inference" else "not ready, its log says why"
    return f"{_named(one)}: {stands}{f', {_build(one)}' if one.release else ''}"


def environment_line(one: RunEnvironment) -> str:
    """An environment of a run in one line."""
    version = f"  version {shown(one.version)}" if one.version else ""
    digests = " -> ".join([one.digest or "not told", *one.later_digests])
    return f"environment {shown(one.id)}{version}  digest {shown(digests)}"


def worth_seeing(services: Sequence[ServiceStatus]) -> list[str]:
    """What is not as it should be, a sentence each: who does not answer, and builds that differ."""
    said = [f"{_named(one)} does not answer: {shown(one.error)}" for one in services if one.error]
    here, known = build_of(), [one for one in services if one.release]
    builds = {(here.release, here.sdk), *((one.release, one.sdk_build) for one in known)}
    own = {(one.service, one.build) for one in known}
    if len(builds) > 1 or len(own) > len({one.service for one in known}):
        told = dict.fromkeys([f"this command {here}", *(f"{one.service} {_build(one)}" for one in known)])
        said.append(f"builds differ: {', '.join(told)}")
    return said


def _named(one: ServiceStatus) -> str:
    return f"{one.service} at {one.address}" if one.address else one.service


def _build(one: ServiceStatus) -> Build:
    return Build(one.release, one.sdk_build, one.build)


def run_line(one: Run) -> str:
    """A run in one line."""
    error = f"  {shown(one.error)}" if one.error else ""
    doing = f"  {shown(one.doing)}" if one.doing else ""
    return (
        f"{one.run_id}  {phase_name(one.phase)}  step {one.step}/{one.max_steps}{_rewards(one)}{doing}{error}"
    )


def _rewards(one: Run) -> str:
    """Before and after training; where agents are rewarded apart, also what each of them earned."""
    told = []
    if one.HasField("reward_before"):
        earned = [(agent, agent.reward_before) for agent in one.agents if agent.HasField("reward_before")]
        told.append(f"before {one.reward_before:.3f}{_of_agents(one, earned)}")
    if one.HasField("reward_after"):
        earned = [(agent, agent.reward_after) for agent in one.agents if agent.HasField("reward_after")]
        told.append(f"after {one.reward_after:.3f}{_of_agents(one, earned)}")
    return f"  reward {', '.join(told)}" if told else ""


def _of_agents(one: Run, earned: Sequence[tuple[RunAgent, float]]) -> str:
    """With its environment, where several reward agents apart."""
    several = len({agent.environment for agent in one.agents}) > 1
    names = (f"{agent.environment} {agent.agent}" if several else agent.agent for agent, _ in earned)
    each = [f"{shown(name)} {reward:.3f}" for name, (_, reward) in zip(names, earned, strict=True)]
    return f" ({', '.join(each)})" if each else ""
