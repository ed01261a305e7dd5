"""The environment's judgement of a whole episode, `Env.finalize`: where attempts are compared.

Verifiers records what it raises as it records what `run` raises. Here the one is a scorer that failed and the
other an environment that did, so how far it came is noted for the rollout, by episode: a retry makes another.
Also sys.exit() in it is an error of this rollout alone; so is, there and in a task's own scoring, a
CancelledError where nobody cancels the rollout: it awaits what was cancelled.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable
from typing import Any

import verifiers.v1 as vf
from quartet.kit.own_tasks import from_outside, told

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
        await _contained(finalize(task, episode))
        noted[episode.id] = Judgement.DONE

    score = vf.Task.score

    async def scored(self: Any, *args: Any, **kwargs: Any) -> None:
        await _contained(score(self, *args, **kwargs))

    env.finalize, vf.Task.score = watched, scored


async def _contained(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        raise
    except BaseException as error:
        if from_outside(error):
            raise
        raise told(error) from error
