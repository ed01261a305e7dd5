"""One loaded classic environment: its examples, its description, its rollouts.

1. `args` are the keyword arguments of its `load_environment`; one that it does not take is refused with the
   nearest known name.
2. Training examples are its `dataset`, evaluation examples its `eval_dataset`, or the training ones where it
   has none, as Verifiers has it. Both in the order in which they are stored.
3. Signal handlers are as they were before it was loaded: the front alone decides when a worker ends.
4. An environment whose rewards compare the members of a group is refused: members are run one by one.

Pinned to verifiers 0.3: it calls `_run_rollout_state`, which is private.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import inspect
import json
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import verifiers as vf
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost.classic.outcome import rollout_of
from quartet_envhost.classic.policy import RolloutPolicy, sampling_args
from quartet_envhost.classic.scoring import scoring_faults, watch
from quartet_envhost.config import canonical_id, distribution_version
from quartet_envhost.sampler import MODEL_NAME, Sampler

# A longer list is asked for in parts; it would not fit into a message with its data.
MAX_TASKS: Final = 4096
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class HostedEnvironment:
    """An environment with its examples, ready to run."""

    def __init__(self, env_id: str, args: dict[str, Any]) -> None:
        """Import and load, on the main thread. Raises QuartetError(INVALID_CONFIG, ENVIRONMENT_UNKNOWN)."""
        self._id = env_id
        # Rubrics fork pools of processes; this one has threads by now, and forking it could lock them.
        multiprocessing.set_start_method("forkserver", force=True)
        load = _loader(env_id)
        _check_arguments(env_id, load, args)
        with _signals_kept():
            self._env = load(**args)
            self._env.env_id = self._env.env_id or env_id
            self._env.env_args = self._env.env_args or args
        if self._env.requires_group_rollouts:
            text = f"environment {env_id!r} scores whole groups at once; this host runs members one by one"
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=env_id)
        self._weights = watch(self._env)
        self._rows = {
            envhost_service_pb2.SPLIT_TRAIN: _rows(self._env, "build_dataset", "dataset"),
            envhost_service_pb2.SPLIT_EVAL: _rows(self._env, "build_eval_dataset", "eval_dataset"),
        }
        if self._rows[envhost_service_pb2.SPLIT_EVAL] is None:
            self._rows[envhost_service_pb2.SPLIT_EVAL] = self._rows[envhost_service_pb2.SPLIT_TRAIN]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Tear down what the environment started, on the loop that it ran on."""
        try:
            yield
        finally:
            await self._env._teardown()
            # Verifiers registered the same for the end of the process.
            self._env._teardown = _nothing

    def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """The description, with sizes."""
        return envhost_service_pb2.EnvironmentInfo(
            id=self._id,
            version=distribution_version(self._id),
            api="classic",
            verifiers_version=vf.__version__,
            train_size=len(self._split(envhost_service_pb2.SPLIT_TRAIN)),
            eval_size=len(self._split(envhost_service_pb2.SPLIT_EVAL)),
            rewards=sorted(name for name, weight in self._weights.items() if weight),
            metrics=sorted(name for name, weight in self._weights.items() if not weight),
        )

    def tasks(self, request: envhost_service_pb2.GetTasksRequest) -> envhost_service_pb2.GetTasksResponse:
        """The examples asked for, in stable order."""
        response = envhost_service_pb2.GetTasksResponse()
        rows = self._split(request.split)
        end = min(len(rows), request.start + min(request.count, MAX_TASKS))
        for index in range(request.start, end):
            data = json.dumps(rows[index], default=str, ensure_ascii=False)
            key = hashlib.blake2b(data.encode(), digest_size=16).hexdigest()
            response.tasks.add(index=index, key=key, data_json=data if request.include_data else "")
        return response

    async def run(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest, timeout_s: float
    ) -> rollout_pb2.Rollout:
        """Run the one member of the request. Raises QuartetError(RESOURCE_UNKNOWN) where no such task is."""
        rows, index = self._split(request.split), request.task_index
        if index >= len(rows):
            raise QuartetError("RESOURCE_UNKNOWN", f"{self._id} has no task {index}", name=f"task {index}")
        member = request.members[0]
        started = time.monotonic()
        policy = RolloutPolicy(sampler, request, started + timeout_s)
        sampling = {**(self._env.sampling_args or {}), **sampling_args(request.sampling)}
        faults: list[str] = []
        token = scoring_faults.set(faults)
        raised = None
        try:
            policy.state = await self._env._run_rollout_state(rows[index], policy, MODEL_NAME, sampling)
        except Exception as error:  # noqa: BLE001 - the environment's own code; typed below
            raised = error
        finally:
            scoring_faults.reset(token)
        rollout = rollout_of(
            policy,
            raised,
            faults,
            self._weights,
            member,
            with_messages=member < request.messages_of_members,
        )
        rollout.timing.total_ms = round(1000 * (time.monotonic() - started))
        return rollout

    def _split(self, split: int) -> Any:
        return self._rows[split or envhost_service_pb2.SPLIT_TRAIN] or ()  # type: ignore[index]


def _loader(env_id: str) -> Callable[..., Any]:
    module_name = canonical_id(env_id)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = "is not installed; install it" if error.name == module_name else f"needs {error.name!r}"
        text = f"environment {env_id!r} {missing} into the interpreter"
        raise QuartetError("ENVIRONMENT_UNKNOWN", text, env_id=env_id) from error
    load: Callable[..., Any] | None = getattr(module, "load_environment", None)
    if load is None:
        text = (
            f"package {module_name!r} has no load_environment: it is none of classic Verifiers; "
            "a package of verifiers 0.4 needs an interpreter that has that"
        )
        raise QuartetError("INVALID_CONFIG", text, key="python", value=env_id)
    return load


def _check_arguments(env_id: str, load: Callable[..., Any], args: dict[str, Any]) -> None:
    parameters = inspect.signature(load).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in args:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(parameters) or 'none'}"
            text = f"environment {env_id!r} takes no argument {name!r}; {remedy}"
            raise QuartetError("INVALID_CONFIG", text, key=f"args.{name}", value="", remedy=remedy)


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
