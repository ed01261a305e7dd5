"""One loaded classic environment: its examples, its description, its rollouts.

1. `args` are the keyword arguments of its `load_environment`, and `system_prompt` (instruction.py); one that
   it does not take is refused with the nearest known name.
2. Training examples are its `dataset`, evaluation examples its `eval_dataset`, or the training ones where it
   has none, as Verifiers has it. Both in the order in which they are stored.
3. Signal handlers are as they were before it was loaded: the front alone decides when a worker ends.
4. Where rewards compare the members of a group, its rollouts are scored together (groups.py); a member that
   failed is not among them.
5. A row of a mixture (`EnvGroup`, also one of mixtures) is played and scored by the part that it is of.

Pinned to verifiers 0.3: it does what `_run_rollout_state` and `_run_group_states` do, which are private, and
`run_rollout` of an `EnvGroup`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import verifiers as vf
from quartet import task_data
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import consists, failures
from quartet_envhost.arguments import not_taken
from quartet_envhost.classic import pools
from quartet_envhost.classic.instruction import Told, split_off
from quartet_envhost.classic.outcome import rollout_of
from quartet_envhost.classic.policy import RolloutPolicy
from quartet_envhost.classic.scoring import faults_of, noted, rubrics_of, watch
from quartet_envhost.classic.tuning import remember_signatures, sort_tokens_at_once
from quartet_envhost.config import canonical_id, distribution_version
from quartet_envhost.frames import MAX_MESSAGE_BYTES
from quartet_envhost.groups import Groups, OutOfTime
from quartet_envhost.no_task import no_task
from quartet_envhost.own_code import OwnCode
from quartet_envhost.sampler import MODEL_NAME, Sampler, sampling_values

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: Columns of an example that say more of it than its prompt. Its others are what the prompt was made of.
_TOLD: Final = ("answer", "info", "task")


class HostedEnvironment:
    """An environment with its examples, ready to run."""

    def __init__(self, env_id: str, args: dict[str, Any], own: OwnCode) -> None:
        """Import and load, on the main thread. Raises QuartetError(INVALID_CONFIG, ENVIRONMENT_UNKNOWN)."""
        self._id = env_id
        self._own = own
        self._args = copy.deepcopy(args)  # as they were given
        pools.scale()
        remember_signatures()
        sort_tokens_at_once()
        load = _loader(env_id)
        args, prompt = split_off(env_id, args, inspect.signature(load).parameters)
        _check_arguments(env_id, load, args)
        with _signals_kept():
            self._env = _environment(env_id, load(**args))
            self._env.env_id = self._env.env_id or env_id
            self._env.env_args = self._env.env_args or args
        # Also where only a part of a mixture asks for it, which Verifiers itself does not see.
        self._scores_groups = any(rubric.has_group_rewards for rubric in rubrics_of(self._env))
        self._groups = Groups(self._score)
        self._weights = watch(self._env, own)
        self._rows = {
            envhost_service_pb2.SPLIT_TRAIN: _rows(self._env, "build_dataset", "dataset"),
            envhost_service_pb2.SPLIT_EVAL: _rows(self._env, "build_eval_dataset", "eval_dataset"),
        }
        if self._rows[envhost_service_pb2.SPLIT_EVAL] is None:
            self._rows[envhost_service_pb2.SPLIT_EVAL] = self._rows[envhost_service_pb2.SPLIT_TRAIN]
        if prompt is not None:
            self._rows = {split: rows and Told(rows, prompt) for split, rows in self._rows.items()}

    @contextlib.asynccontextmanager
    async def serving(self, stall_s: float, lost: Callable[[str], None]) -> AsyncIterator[None]:
        """Tear down what the environment started, on the loop that it ran on.

        Only it knows what that is: nothing is ever `lost`.
        """
        try:
            yield
        finally:
            await self._env._teardown()
            # Verifiers registered the same for the end of the process.
            self._env._teardown = _nothing

    async def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """The description, with sizes and digests."""
        info = envhost_service_pb2.EnvironmentInfo(
            id=self._id,
            version=distribution_version(self._id),
            api="classic",
            verifiers_version=vf.__version__,
            train_size=len(self._split(envhost_service_pb2.SPLIT_TRAIN)),
            eval_size=len(self._split(envhost_service_pb2.SPLIT_EVAL)),
            group_scoring=self._scores_groups,
            rewards=sorted(name for name, weight in self._weights.items() if weight),
            metrics=sorted(name for name, weight in self._weights.items() if not weight),
            weights={name: weight for name, weight in self._weights.items() if weight},
        )
        await consists.tell(info, self._args, self._own.files.has, self.tasks)
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """The examples asked for, in stable order."""
        response = envhost_service_pb2.GetTasksResponse()
        rows, room = self._split(request.split), MAX_MESSAGE_BYTES
        end = min(len(rows), request.start + request.count)
        for index in range(request.start, end):
            data = json.dumps(rows[index], default=str, ensure_ascii=False)
            key = hashlib.blake2b(data.encode(), digest_size=16).hexdigest()
            response.tasks.add(index=index, key=key, data_json=data if request.include_data else "")
            room -= len(response.tasks[-1].data_json)
            if room < 0:  # it is refused for that, and need not have the rest
                break
        return response

    async def run(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest
    ) -> rollout_pb2.Rollout:
        """Run the first member of the request. Raises QuartetError(RESOURCE_UNKNOWN): no such task."""
        rows, index = self._split(request.split), request.task_index
        if index >= len(rows):
            raise no_task(self._id, index, len(rows))
        member = request.members[0]
        started = time.monotonic()
        policy = RolloutPolicy(sampler, request, started + request.timeout_ms / 1000)
        faults: list[str] = []
        raised = None
        try:
            with noted(faults):
                await (self._grouped if self._scores_groups else self._alone)(policy, rows[index], request)
        except OutOfTime as error:
            return failures.failed(member, failures.TIMEOUT, str(error), retryable=False)
        except Exception as error:  # noqa: BLE001 - the environment's own code; typed below
            raised = error
        if policy.state is not None:
            faults += faults_of(policy.state)
        rollout = rollout_of(
            policy,
            raised,
            faults,
            self._weights,
            self._own,
            member,
            with_messages=member < request.messages_of_members,
        )
        if member < request.messages_of_members:
            row = rows[index]
            rollout.task_json = task_data.told({name: row[name] for name in _TOLD if name in row})
        rollout.timing.total_ms = round(1000 * (time.monotonic() - started))
        return rollout

    async def _alone(
        self, policy: RolloutPolicy, row: Any, request: envhost_service_pb2.RunRolloutsRequest
    ) -> None:
        if (part := await self._played(policy, row, request)) is not None:
            await self._score([(part, policy.state)])

    async def _grouped(
        self, policy: RolloutPolicy, row: Any, request: envhost_service_pb2.RunRolloutsRequest
    ) -> None:
        async def played() -> Any:
            part = await self._played(policy, row, request)
            return None if part is None else (part, policy.state)

        await self._groups.scored(request, played)

    async def _played(
        self, policy: RolloutPolicy, row: Any, request: envhost_service_pb2.RunRolloutsRequest
    ) -> Any:
        """Run the rollout up to its scoring; the part that scores it, or None where there is nothing to."""
        part = self._env
        while isinstance(part, vf.EnvGroup):
            name, row, _ = part._route_child_input(row)
            part = part.get_env_for_name(name)
        sampling = {**(self._env.sampling_args or {}), **sampling_values(request.sampling)}
        policy.state = state = await part.rollout(row, policy, MODEL_NAME, sampling)
        if state.get("error") is None and not state.get("timed_out"):
            return part
        await part.rubric.cleanup(state)
        return None

    async def _score(self, played: list[tuple[Any, Any]]) -> None:
        """Score rollouts that have ended, each with its part: a whole group of one, or one for itself."""
        part, states = played[0][0], [state for _, state in played]
        rubric, started = part.rubric, time.time()
        for state in states:
            state["timing"].scoring.start = started
        faults: list[str] = []
        with noted(faults), tracing.span("scoring", rollouts=len(states)):
            if not part.score_rollouts:
                await rubric.dummy_score_group(states)
            elif self._scores_groups:
                await rubric.score_group(states)
            else:
                await rubric.score_rollout(states[0])
        for state in states:
            faults_of(state).extend(faults)
            state["timing"].scoring.end = time.time()
            await rubric.cleanup(state)

    def _split(self, split: int) -> Any:
        return self._rows[split or envhost_service_pb2.SPLIT_TRAIN] or ()  # type: ignore[index]


def _loader(env_id: str) -> Callable[..., Any]:
    module_name = canonical_id(env_id)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = "is not installed" if error.name == module_name else f"needs {error.name!r}"
        text = f"environment {env_id!r} {missing}; install it into {sys.executable}"
        raise QuartetError("ENVIRONMENT_UNKNOWN", text, env_id=env_id) from error
    load: Callable[..., Any] | None = getattr(module, "load_environment", None)
    if load is None:
        text = (
            f"package {module_name!r} is installed, and is no environment of classic Verifiers: it has no "
            "load_environment; name another, or for one of verifiers 0.4 an interpreter that has that"
        )
        raise QuartetError("INVALID_CONFIG", text, key="id", value=env_id)
    return load


def _environment(env_id: str, made: Any) -> Any:
    """What load_environment returned, where that is an environment, or stands for one."""
    if callable(getattr(made, "build_dataset", None)):
        return made
    if inspect.iscoroutine(made):
        made.close()
    text = (
        f"environment {env_id!r} does not load: load_environment returned {type(made).__name__!r}, no "
        "vf.Environment; write it as a plain function (no async def) that returns the environment"
    )
    raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=env_id)


def _check_arguments(env_id: str, load: Callable[..., Any], args: dict[str, Any]) -> None:
    parameters = inspect.signature(load).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in args:
        if name not in parameters:
            raise not_taken(env_id, name, parameters)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _rows(env: Any, build: str, name: str) -> Any:
    """A split as a list of rows, built now; None where the environment has none."""
    getattr(env, build)()
    return getattr(env, name)


async def _nothing() -> None:
    pass
