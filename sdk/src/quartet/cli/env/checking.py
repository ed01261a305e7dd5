"""`quartet env check`: an environment played by its oracle and by a policy that knows nothing, or by a model.

1. It passes where no rollout failed and, with an oracle, the right answer earns the full reward each time and
   the wrong one less.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from quartet.cli.env.oracle import Oracle
from quartet.cli.env.under_way import UnderWay
from quartet.cli.eval.board import failures_text
from quartet.cli.eval.config import Trial
from quartet.cli.eval.player import Player
from quartet.cli.eval.rollouts import play, tasks_of
from quartet.cli.eval.rows import failure_kind
from quartet.cli.rounded import rounded
from quartet.counted import counted
from quartet.kit.standard_streams import shown
from quartet.run.statistics import means_by_name, reaches
from quartet.v1.rollout_pb2 import Rollout, Task

#: Another one each time that it hangs.
_WORKER = re.compile(r"worker \d+")


@dataclass
class Played:
    """What one policy made of the examples."""

    who: str
    rollouts: list[tuple[Task, Rollout]] = field(default_factory=list)

    @property
    def results(self) -> list[tuple[Task, Rollout]]:
        """Those with a reward."""
        return [(task, one) for task, one in self.rollouts if not one.HasField("failure")]

    @property
    def failures(self) -> list[tuple[Task, Rollout]]:
        """Those without."""
        return [(task, one) for task, one in self.rollouts if one.HasField("failure")]


async def play_by_oracle(host: Any, trial: Trial, oracle: Oracle, under_way: UnderWay) -> list[Played]:
    """The oracle, then a policy that knows nothing; example by example, for the oracle to know which."""
    tasks = await tasks_of(host, trial)
    played = []
    for who, wrong in (("the oracle", False), ("a wrong answer", True)):
        one = Played(who)
        oracle.wrong = wrong
        under_way.doing(f"playing {who}", len(tasks) * trial.rollouts_per_example)
        for task in tasks:
            oracle.playing(json.loads(task.data_json))
            await _play(host, trial, [task], one, oracle, under_way)
        played.append(one)
    return played


async def play_by_model(
    host: Any, trial: Trial, policy: Player | None, name: str, under_way: UnderWay
) -> list[Played]:
    """A model."""
    one = Played(name)
    tasks = await tasks_of(host, trial)
    under_way.doing(f"playing {name}", len(tasks) * trial.rollouts_per_example)
    await _play(host, trial, tasks, one, policy, under_way)
    return [one]


async def _play(
    host: Any,
    trial: Trial,
    tasks: Sequence[Task],
    into: Played,
    policy: Player | None,
    under_way: UnderWay,
) -> None:
    members = range(trial.rollouts_per_example)

    def note(task: Task, rollout: Rollout) -> None:
        into.rollouts.append((task, rollout))
        under_way.ended(failed=rollout.HasField("failure"))

    await play(host, trial, {task.index: members for task in tasks}, tasks, note, policy)


def played_lines(played: Played, *, tokens: bool) -> list[str]:
    """Rewards, failures, times and token counts."""
    results, failures = counted(len(played.results), "result"), counted(len(played.failures), "failure")
    lines = [f"{played.who}: {results}, {failures}"]
    rollouts = [one for _, one in played.results]
    if rollouts:
        rewards = [one.reward for one in rollouts]
        lines.append(f"  reward       mean {fmean(rewards):.3f}, {min(rewards):.3f} to {max(rewards):.3f}")
        for name, value in means_by_name({**one.rewards, **one.metrics} for one in rollouts).items():
            lines.append(f"  {name:<12} mean {value:.3f}")
        lines.append(_spread("turns", [one.num_turns for one in rollouts], ""))
        lines.append(_spread("time", [one.timing.total_ms / 1000 for one in rollouts], " s"))
        lines.append(_spread("  of it scoring", [one.timing.scoring_ms / 1000 for one in rollouts], " s"))
        if tokens:
            lines.append(_spread("prompt tokens", [one.usage.prompt_tokens for one in rollouts], ""))
            lines.append(_spread("sampled tokens", [one.usage.completion_tokens for one in rollouts], ""))
            lines.append(f"  cut by a limit: {sum(one.truncated for one in rollouts)} of {len(rollouts)}")
    alike: dict[str, list[tuple[Task, Rollout]]] = {}
    for task, one in played.failures:
        alike.setdefault(_WORKER.sub("a worker", _told(one)), []).append((task, one))
    for such in alike.values():
        (task, one), count = such[0], f" ({len(such)} such)" if len(such) > 1 else ""
        lines.append(f"  failed at example {task.index}{count}: {_told(one)}")
    return [shown(line) for line in lines]


def _told(failed: Rollout) -> str:
    return f"{failure_kind(failed)}: {failed.failure.message}"


def _spread(name: str, values: Sequence[float], unit: str) -> str:
    return f"  {name:<12} mean {rounded(fmean(values), 3)}{unit}, most {rounded(max(values), 3)}{unit}"


def problems(played: Sequence[Played], full_reward: float) -> list[str]:
    """Why it does not pass; empty where it does."""
    found = []
    for one in played:
        if one.failures:
            kinds = failures_text(_kinds(one))
            found.append(f"{one.who}: {kinds} of {len(one.rollouts)} rollouts failed")
        elif not one.rollouts:
            found.append(f"{one.who}: nothing was played")
    if len(played) == 2:
        oracle, wrong = played
        short = [(task, each) for task, each in oracle.results if not reaches(each.reward, full_reward)]
        if short:
            task, each = short[0]
            found.append(
                f"the oracle earns {each.reward:.3f} of {full_reward:g} at example {task.index} "
                f"({len(short)} such); mend its answer or the reward, or give --full-reward"
            )
        best = {task.index: each.reward for task, each in oracle.results}
        as_good = [task for task, each in wrong.results if each.reward >= best.get(task.index, full_reward)]
        if as_good:
            found.append(
                f"a wrong answer earns as much as the right one at example {as_good[0].index} "
                f"({len(as_good)} such); the reward tells nothing there"
            )
    return found


def _kinds(played: Played) -> Counter[str]:
    return Counter(failure_kind(one) for _, one in played.failures)
