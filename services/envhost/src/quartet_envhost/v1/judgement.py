"""The environment's judgement of a whole episode, `Env.finalize`: where attempts are compared.

Verifiers records what it raises as it records what `run` raises. Here the one is a scorer that failed and the
other an environment that did, so how far it came is noted for the rollout, by episode: a retry makes another.
Also sys.exit() in it is an error of this rollout alone.
"""

from __future__ import annotations

import enum
from typing import Any

from quartet.kit.own_tasks import CONTROL, told

from quartet_envhost.v1.interception import current_policy


class Judgement(enum.Enum):
    """How far it came: from NOT_BEGUN to UNDER_WAY, where it stays if it does not end, to DONE."""

    NOT_BEGUN = enum.auto()
    UNDER_WAY = enum.auto()
    DONE = enum.auto()


def watch(env: Any) -> None:
    """Note for the current policy how far the judgement of each of its episodes came."""
    finalize = env.finalize

    async def watched(task: Any, episode: Any) -> None:
        noted: dict[str, Judgement] = current_policy.get().judgements
        noted[episode.id] = Judgement.UNDER_WAY
        try:
            await finalize(task, episode)
        except (Exception, *CONTROL):
            raise
        except BaseException as error:
            raise told(error) from error
        noted[episode.id] = Judgement.DONE

    env.finalize = watched
