"""An environment as a host is asked for it, and the bounds of what it is asked."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from quartet.config import Config
from quartet.run.sampling import SamplingKeys
from quartet.run.values import FileTable, Table, Text

#: Environments that every host plays without a package, under the name that their ids have in Python:
#: "reward-service", the prompts and rewards of a RewardService (docs/rewards.md).
BUILT_IN = frozenset({"reward_service"})
#: Rollouts of one task in one request to an environment host; more is a mistake, not a group.
MAX_GROUP = 1024
#: Tries of one rollout inside the host; more would hide an environment that is broken.
MAX_RETRIES = 16
#: Tasks that are listed in one answer.
MAX_TASKS = 4096
#: Limits of a rollout's time: it travels in whole milliseconds, and nothing waits longer than a week.
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.001, 7 * 24 * 3600.0
#: Each has worker processes of its own at every host.
MAX_ENVIRONMENTS = 100

GroupSize = Annotated[int, Field(ge=1, le=MAX_GROUP, strict=True)]


def as_array(tables: Any, key: str) -> Any:
    """What was given for a list of tables, refused where it is one table, or names."""
    if isinstance(tables, dict):
        raise ValueError(f"environments are a list of tables; write [[{key}]] with two brackets")
    names = [tables] if isinstance(tables, str) else tables
    if isinstance(names, list | tuple) and any(isinstance(name, str) for name in names):
        raise ValueError(f'environments are a list of tables; write [[{key}]] with id = "..." for each')
    return tables


class HostedConfig(Config):
    """An environment as the host is asked for it."""

    OF_UNKNOWN_KEYS: ClassVar = "what the environment itself takes stands in its table 'args'"

    #: The environment's package.
    id: Text
    #: What the environment itself takes.
    args: Table
    #: Of one rollout with its scoring.
    timeout_seconds: Annotated[
        float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False, strict=True)
    ] = 600.0
    #: Further tries of a rollout that failed in a way that may pass.
    max_retries: Annotated[int, Field(ge=0, le=MAX_RETRIES, strict=True)] = 2


class NamedConfig(HostedConfig):
    """One of several environments; two of one id, with other arguments, need names."""

    #: What the environment itself takes.
    args: FileTable
    #: Of its metrics; absent: its id.
    name: Text | None = None
    #: What is sampled otherwise than the table around it says.
    sampling: SamplingKeys | None = None

    @property
    def label(self) -> str:
        """What it is called among them."""
        return self.name or self.id


NamedT = TypeVar("NamedT", bound=NamedConfig)


def distinct(environments: tuple[NamedT, ...]) -> tuple[NamedT, ...]:
    """The same, if no two are called alike. Errors: ValueError."""
    labels = [one.label for one in environments]
    twice = sorted({one for one in labels if labels.count(one) > 1})
    if twice:
        raise ValueError(f'two are called {twice[0]!r}; give each a name = "..." of its own, or keep one')
    return environments
