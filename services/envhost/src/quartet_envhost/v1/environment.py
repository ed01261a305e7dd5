"""One loaded environment: its tasks, its description, its rollouts.

1. `args` may name fields of the taskset ("num_train", "split") and of the environment ("agent", "timeout");
   anything else is refused with the nearest known name. "env" names another environment over the taskset, as
   Verifiers' `--env.id` does ("best-of-n"), whose fields the rest then are.
2. Roles that do not say where and how they run get the in-process harness on the local machine. A harness
   that executes what its model says does so nowhere before somebody has said where: the package, by another
   runtime than Verifiers' own default, or the role's `runtime` in `args`.
3. Training examples are the taskset as configured. Evaluation examples are those of the `split` that `args`
   name, or that it has for them (tasks.py 3); a taskset without splits evaluates on its training examples.
4. Equal (id, args) give equal tasks in equal order.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pkgutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pydantic
import verifiers
import verifiers.v1 as vf
from quartet import task_data
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.v1 import envhost_service_pb2, rollout_pb2
from verifiers.v1 import envs
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    import_taskset,
    load_environment,
    resolve_env_config,
    taskset_config_type,
)

from quartet_envhost import consists
from quartet_envhost.arguments import not_taken
from quartet_envhost.config import distribution_version
from quartet_envhost.frames import MAX_MESSAGE_BYTES
from quartet_envhost.no_task import no_task
from quartet_envhost.own_code import OwnCode
from quartet_envhost.sampler import MODEL_NAME, Sampler
from quartet_envhost.v1.arguments import tolerate_deep_arguments
from quartet_envhost.v1.deferred import TASKSETS, defer
from quartet_envhost.v1.folders import make_folders_when_used
from quartet_envhost.v1.harness import HARNESS_ID
from quartet_envhost.v1.interception import POLICY_CONFIG, HostInterception, current_policy
from quartet_envhost.v1.judgement import watch
from quartet_envhost.v1.outcome import rollout_of, traces_of
from quartet_envhost.v1.policy import RolloutPolicy, sampling_config
from quartet_envhost.v1.raised import tell_where
from quartet_envhost.v1.scoring import name_scores
from quartet_envhost.v1.shared import looked_after
from quartet_envhost.v1.starts import end_waits_with_servers, hand_out_keys
from quartet_envhost.v1.tasks import Tasks, eval_tasks, tell_of_no_task
from quartet_envhost.v1.tuning import remember_certificates, remember_default_factories

# The argument that names another environment over the taskset.
_OVER: Final = "env"
#: Of a task's data, what all tasks have and how they are run. What names one is told, where there is any.
_COMMON: Final = frozenset(vf.TaskData.model_fields) - {"id", "name"}

log = logging.getLogger(__name__)


class HostedEnvironment:
    """An environment with its tasks, ready to run."""

    def __init__(self, env_id: str, args: dict[str, Any], own: OwnCode) -> None:
        """Import, configure and load. Raises QuartetError(INVALID_CONFIG, ENVIRONMENT_UNKNOWN)."""
        self._id = env_id
        self._args = copy.deepcopy(args)  # Verifiers puts what it makes of them in their place
        self._own = own
        defer(TASKSETS)
        remember_default_factories()
        remember_certificates()
        make_folders_when_used()
        end_waits_with_servers()
        hand_out_keys()
        tolerate_deep_arguments()
        tell_where(own)
        name_scores()
        self._env = load_environment(environment_config(env_id, args))
        _check_runtimes(self._env, env_id, self._args)
        watch(self._env)
        tell_of_no_task(self._env.taskset)
        train = Tasks(self._env.taskset)
        self._tasks = {
            envhost_service_pb2.SPLIT_TRAIN: train,
            envhost_service_pb2.SPLIT_EVAL: eval_tasks(self._env.taskset, train, own),
        }

    @contextlib.asynccontextmanager
    async def serving(self, stall_s: float, lost: Callable[[str], None]) -> AsyncIterator[None]:
        """Hold what all rollouts share: tool servers, the interception, what the environment starts.

        `lost` is called when one of the servers is (shared.py). The steps of `Env.serving()` with our
        interception (verifiers 0.4.0).
        """
        async with self._env.shared_tools() as shared:
            secrets = [server.state_secret for server in shared.values() if server.state_secret]
            async with HostInterception(state_service_secrets=secrets) as interception:
                self._env._shared_tools, self._env._interception = shared, interception
                try:
                    await self._env.start()
                    async with looked_after(shared, stall_s, lost):
                        yield
                finally:
                    await self._env.stop()
                    self._env._shared_tools, self._env._interception = {}, None

    async def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """The description, with sizes and digests."""
        info = envhost_service_pb2.EnvironmentInfo(
            id=self._id,
            version=distribution_version(self._id),
            api="v1",
            verifiers_version=verifiers.__version__,
            infinite=not self._env.taskset.bounded,
        )
        train = self._split(envhost_service_pb2.SPLIT_TRAIN)
        if not info.infinite:
            info.train_size = train.size()
            try:
                info.eval_size = self._split(envhost_service_pb2.SPLIT_EVAL).size()
            except QuartetError as error:  # a guess that was wrong (tasks.py 4) is no reason not to train
                log.warning(error.message)
        first = train.get(0)
        if first is not None:
            weights = {fn.__name__: getattr(fn, "_vf_weight", 1.0) for fn in first.hooks("reward")}
            weights |= {judge.reward_name: judge.config.weight for judge in first.plugged_judges()}
            metrics = {fn.__name__ for fn in first.hooks("metric")}
            metrics |= {name for name, weight in weights.items() if not weight}
            info.weights.update({name: weight for name, weight in weights.items() if weight})
            info.rewards.extend(sorted(info.weights))
            info.metrics.extend(sorted(metrics))
        await consists.tell(info, self._args, self._own.files.has, self.tasks)
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """The examples asked for, in stable order."""
        response = envhost_service_pb2.GetTasksResponse()
        split, room = self._split(request.split), MAX_MESSAGE_BYTES
        for index in range(request.start, request.start + request.count):
            task = split.get(index)
            if task is None:
                break
            data = task.data.model_dump_json(exclude_none=True) if request.include_data else ""
            response.tasks.add(index=index, key=task.key, data_json=data)
            room -= len(data)
            if room < 0:  # it is refused for that, and need not have the rest
                break
        return response

    async def run(
        self,
        sampler: Sampler,
        request: envhost_service_pb2.RunRolloutsRequest,
    ) -> rollout_pb2.Rollout:
        """Run the one member of the request. Raises QuartetError(RESOURCE_UNKNOWN) where no such task is."""
        split = self._split(request.split)
        task = split.get(request.task_index)
        if task is None:
            raise no_task(self._id, request.task_index, split.count)
        member = request.members[0]
        started = time.monotonic()
        policy = RolloutPolicy(sampler, request, started + request.timeout_ms / 1000)
        context = vf.ModelContext(
            model=MODEL_NAME, client=POLICY_CONFIG, sampling=sampling_config(request.sampling)
        )
        token = current_policy.set(policy)
        try:
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, context)
        finally:
            current_policy.reset(token)
        for trace in traces_of(episode):
            times = trace.timing
            tracing.past("setup", times.boot.start, times.setup.end, agent=trace.agent.name)
            tracing.past("scoring", times.scoring.start, times.scoring.end, agent=trace.agent.name)
        with_messages = member < request.messages_of_members
        rollout = rollout_of(
            episode,
            policy,
            member,
            accepted=self._env.complete(episode),
            total_seconds=time.monotonic() - started,
            with_messages=with_messages,
        )
        if with_messages:
            rollout.task_json = task_data.told(_own_fields(task.data))
        return rollout

    def _split(self, split: int) -> Tasks:
        return self._tasks[split or envhost_service_pb2.SPLIT_TRAIN]  # type: ignore[index]


def _own_fields(data: Any) -> dict[str, Any]:
    """What a task says besides its prompt and how it is run, which all tasks have: its own fields."""
    own = {*type(data).model_fields, *(data.model_extra or ())} - _COMMON
    found: dict[str, Any] = data.model_dump(mode="json", include=own, exclude_none=True)
    return found


def environment_config(env_id: str, args: dict[str, Any]) -> Any:
    """The environment's validated configuration."""
    try:
        _check_exported(env_id)
        taskset_type = taskset_config_type(env_id)
        taskset_fields = set(taskset_type.model_fields) - {"id"}
        over = "" if _OVER in taskset_fields else args.get(_OVER, "")
        config_type = _type_over(env_id, over) if over else env_config_type(env_id)
    except ModuleNotFoundError as error:
        raise _not_found(env_id, error) from error
    env_fields = set(config_type.model_fields) - {"id", "taskset"}
    raw: dict[str, Any] = {"id": over, "taskset": {"id": env_id}}
    for name, value in args.items():
        if name in taskset_fields:
            raw["taskset"][name] = value
        elif name == _OVER:
            continue
        elif name in env_fields:
            raw[name] = value
        else:
            raise not_taken(env_id, name, taskset_fields | env_fields)
    ships_harness = default_harness_id(env_id) != "bash"
    for name, info in config_type.model_fields.items():
        if isinstance(info.default, AgentConfig):
            raw[name] = _placed(info.default, raw.get(name, {}), ships_harness)
    try:
        # First alone: validating it inside the rest, Verifiers 0.4.0 trips over some kinds of error.
        taskset_type.model_validate(raw["taskset"])
        return resolve_env_config(raw)
    except pydantic.ValidationError as error:
        raise _refused(env_id, error) from error


def _check_exported(env_id: str) -> None:
    """Whether the package is one of an environment: any name is, of whatever else is installed. Raises
    QuartetError, and what its import raises."""
    package = import_taskset(env_id)
    exported = (getattr(package, name, None) for name in getattr(package, "__all__", ()))
    if any(isinstance(one, type) and issubclass(one, vf.Taskset) for one in exported):
        return
    remedy = "name another; one of your own says in __all__ which class is its Taskset"
    if hasattr(package, "load_environment"):
        remedy = "it is one of classic Verifiers (it has load_environment); give it an interpreter with 0.3"
    text = f"package {package.__name__!r} is installed, and is no environment of verifiers 0.4: {remedy}"
    raise QuartetError("INVALID_CONFIG", text, key="id", value=env_id)


def _type_over(env_id: str, over: Any) -> Any:
    """The settings of an environment that runs another's taskset."""
    try:
        if not isinstance(over, str):
            raise TypeError("not a name")
        return env_config_type(env_id, over)
    # As its import has it: not there, or a package that has no environment to give.
    except (ModuleNotFoundError, TypeError, AttributeError) as error:
        shipped = ", ".join(module.name.replace("_", "-") for module in pkgutil.iter_modules(envs.__path__))
        text = f"no environment args.{_OVER} = {over!r} is there to run {env_id!r}; Verifiers has {shipped}"
        raise QuartetError("INVALID_CONFIG", text, key=f"args.{_OVER}", value=str(over)) from error


def _placed(default: Any, given: Any, ships_harness: bool) -> Any:
    """A role's settings, with harness and runtime filled in where neither author nor caller chose them."""
    if not isinstance(given, dict):
        return given
    placed = dict(given)
    if default.harness is None and "harness" not in given and not ships_harness:
        placed["harness"] = {"id": HARNESS_ID}
    if _runtime_is_unsaid(default, given):
        placed["runtime"] = {"type": "subprocess"}
    return placed


def _runtime_is_unsaid(default: Any, given: dict[str, Any]) -> bool:
    """Whether it is Verifiers' own, a sandbox elsewhere, that neither author nor caller chose."""
    return "runtime" not in given and default.runtime == AgentConfig.model_fields["runtime"].default


def _check_runtimes(env: Any, env_id: str, args: dict[str, Any]) -> None:
    """Whether all harnesses that execute what a model says were told where. Raises QuartetError."""
    for role, agent in env._agent_specs.items():
        harness, default = env._harnesses[role], type(env.config).model_fields[role].default
        # Its environment may have put it elsewhere meanwhile.
        here = isinstance(agent.runtime, vf.SubprocessConfig)
        if here and harness.EXECUTES_CODE and _runtime_is_unsaid(default, args.get(role, {})):
            key = f"args.{role}.runtime"
            remedy = f'{key} = {{ type = "docker" }} has it done in a container'
            if not harness.NEEDS_CONTAINER:
                remedy += ', { type = "subprocess" } on the host, with all rights of its user'
            what = f"harness {harness.config.id!r} executes what the model says; {remedy}"
            raise QuartetError(
                "INVALID_CONFIG", f"environment {env_id!r}: {what}", key=key, value="", remedy=remedy
            )


def _not_found(env_id: str, error: ModuleNotFoundError) -> QuartetError:
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0]
    module = name.replace("-", "_").lower()
    cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    if cause.name and cause.name != module:
        text = f"environment {env_id!r} needs the package {cause.name!r}; install it into {sys.executable}"
    else:
        text = (
            f"environment {env_id!r} is not installed; install the package {name!r} into {sys.executable}, "
            f"or name the interpreter that has it by the host's key environments.{name}.python"
        )
    return QuartetError("ENVIRONMENT_UNKNOWN", text, env_id=env_id)


def _refused(env_id: str, error: pydantic.ValidationError) -> QuartetError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"] if part != "taskset"]
    key = ".".join(["args", *path])
    value = json.dumps(first["input"], default=str)
    problem = first["msg"].removeprefix("Value error, ")
    what = f"{key} = {value}" if path else "its arguments"
    text = f"environment {env_id!r} refuses {what}: {problem}"
    if first["type"] == "missing":
        problem, value = "it has no default", ""  # what pydantic tells is what it is missing in
        text = f"environment {env_id!r} needs {key}: {problem}"
    return QuartetError(
        "INVALID_CONFIG",
        text,
        key=key,
        value=value,
        remedy=problem,
    )
