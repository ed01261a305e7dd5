"""Loading an environment into its worker: one that is built into the host by its id, any other by the
Verifiers of the worker's interpreter.

1. Only the adapter that this interpreter can run is imported: the other cannot be. One that is built in needs
   no Verifiers.
2. Whatever the environment's own code raises is a refusal to load (ENVIRONMENT_UNAVAILABLE), with where it
   was raised. Its data is read, too, so that what is wrong with it shows now. So is what it raises where it
   brings up what all rollouts share, such as tool servers.
3. From before the environment is imported on, its worker can be asked for its stack (stack.py).
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from quartet.errors import QuartetError
from quartet.kit import own_tasks
from quartet.kit.imports import uncollected
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost.as_told import described
from quartet_envhost.config import canonical_id, check_version, how_to_install
from quartet_envhost.garbage import look_seldom
from quartet_envhost.own_code import OwnCode
from quartet_envhost.sampler import Sampler
from quartet_envhost.stack import write_when_asked

# The adapter that each line of Verifiers is run by.
GENERATIONS: Final = {"0.4.": "v1", "0.3.": "classic"}
# The adapter of each environment that is built in.
BUILT_IN_ADAPTERS: Final = {"reward_service": "rewarded"}


class Hosted(Protocol):
    """A HostedEnvironment, whichever adapter's."""

    async def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """The description, with sizes and digests."""
        ...

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """The examples asked for, in stable order."""
        ...

    def serving(self, stall_s: float, lost: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
        """Hold what all rollouts share; `lost` is called with why where a part of it ended, or said nothing
        for `stall_s`, and only a new worker can have it again."""
        ...

    async def run(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest
    ) -> rollout_pb2.Rollout:
        """Run the first member of the request. Raises QuartetError(RESOURCE_UNKNOWN): no such task."""
        ...


@dataclass(frozen=True)
class Loaded:
    """An environment, ready to run."""

    env_id: str
    environment: Hosted
    own: OwnCode
    #: An EnvironmentInfo, serialised.
    info: bytes

    async def serve(self, until: AsyncExitStack, stall_s: float, lost: Callable[[str], None]) -> None:
        """Bring up what all rollouts share, until the stack is closed. Raises QuartetError."""
        with _refusing(self.env_id, self.own):
            await until.enter_async_context(self.environment.serving(stall_s, lost))


async def load(settings: dict[str, Any]) -> Loaded:
    """The environment that the front names in its settings. Raises QuartetError."""
    env_id = settings["id"]
    with uncollected():
        adapter = BUILT_IN_ADAPTERS.get(canonical_id(env_id)) or _generation()
        hosted = importlib.import_module(f"quartet_envhost.{adapter}.environment")
    own = OwnCode(env_id)
    if "stack_fd" in settings:  # not of a front of an earlier release
        write_when_asked(settings["stack_fd"], own.files)
    check_version(env_id)
    with _refusing(env_id, own):
        environment: Hosted = hosted.HostedEnvironment(env_id, settings["args"], own)
        info = await environment.describe()
        loaded = Loaded(env_id, environment, own, described(info).SerializeToString())
    # The garbage collector need not walk the hundred thousands of objects that Verifiers and its imports
    # leave.
    gc.collect()
    gc.freeze()
    look_seldom()
    return loaded


@contextmanager
def _refusing(env_id: str, own: OwnCode) -> Iterator[None]:
    """Whatever the environment's own code raises inside is a refusal to load, reported as such; also
    sys.exit(), which would end the worker without a word."""
    try:
        yield
    except QuartetError:
        raise
    except own_tasks.CONTROL:
        raise
    except BaseException as error:
        text = f"environment {env_id!r} does not load: {own.text_of(error)}"
        raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=env_id) from error


def import_ahead() -> None:
    """What all environments of this interpreter need, and nothing of one. Raises what imports raise.

    Not the `datasets` library: environments may set variables of it first, and it starts a thread.
    """
    with uncollected():
        importlib.import_module(f"quartet_envhost.{_generation()}.environment")


def _generation() -> str:
    """The adapter for the Verifiers of this interpreter."""
    try:
        import verifiers
    except ImportError as error:
        how = how_to_install(sys.executable)
        text = f"interpreter {sys.executable} has no verifiers; in the repository: {how}"
        raise QuartetError("INVALID_CONFIG", text, key="python", value=sys.executable) from error
    version = verifiers.__version__
    for line, generation in GENERATIONS.items():
        if version.startswith(line):
            return generation
    text = f"interpreter {sys.executable} has verifiers {version}; hosted are 0.4 (v1) and 0.3 (classic)"
    raise QuartetError("INVALID_CONFIG", text, key="python", value=sys.executable)
