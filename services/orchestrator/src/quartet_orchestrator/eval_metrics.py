"""Metrics of an evaluation, from the rollouts that ended in it.

1. Only results count: a rollout that failed for good, or did not end in time, is no reward. It is missing
   from "coverage" = results / asked, and counted by the kind of its failure ("unfinished" where it has none).
2. Each environment is reported apart; what has no result at all has a coverage, and nothing else.
3. A length is that of what would be trained, as of a step's rollouts (metrics.py): its usage also counts what
   agents said that are not.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean, pstdev
from sys import intern

from quartet.kit.unknown import enum_name
from quartet.run.evaluation import EvalTrial
from quartet.run.statistics import means_by_name, summarise
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

from quartet_orchestrator.batches import covered_tokens
from quartet_orchestrator.parts import means_by_agent

UNFINISHED = "UNFINISHED"
# Of the names below, those of agents. A figure of an environment's own (".../metrics/...") may look alike.
_OF_AGENT = re.compile(r"eval/((?:(?!/rewards/|/metrics/).)+?)/agents/(.+)/reward", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """What a figure needs to know of a rollout; an evaluation may have more rollouts than fit into memory."""

    reward: float
    length: int
    #: What its environment says of it, by name: parts of the reward, and what is only measured.
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    #: What the agents of each role earned, where they are rewarded apart.
    agents: Mapping[str, float]

    @classmethod
    def of(cls, rollout: rpb.Rollout) -> Result:
        """Of one that ended well."""
        told = rollout.rewards, rollout.metrics, means_by_agent([rollout])
        return cls(rollout.reward, covered_tokens([rollout]), *map(_by_name, told))


@dataclass
class Outcome:
    """What became of one environment's rollouts, by its example and their member."""

    trial: EvalTrial
    #: Examples of it that are evaluated.
    examples: int
    #: Whether the rollouts of an example are rewarded by comparison with each other.
    compares: bool = False
    good: dict[tuple[int, int], Result] = field(default_factory=dict)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, trial: EvalTrial, info: EnvironmentInfo) -> Outcome:
        """Nothing has ended yet."""
        return cls(trial, min(trial.num_examples, info.eval_size), info.group_scoring)

    @property
    def asked(self) -> int:
        """How many rollouts are wanted of it in all."""
        return self.examples * self.trial.rollouts_per_example

    def ended(self, example: int, rollout: rpb.Rollout) -> None:
        """One more attempt ended; attempts of one member come in order, and the last one counts."""
        key = (example, rollout.member)
        if rollout.HasField("failure"):
            self.failed[key] = enum_name(rpb.FailureKind, rollout.failure.kind)
            # It had a result where a kill left a part of its group, all of which is run again.
            self.good.pop(key, None)
        else:
            self.failed.pop(key, None)
            self.good[key] = Result.of(rollout)

    def missing(self, example: int) -> list[int]:
        """The members of an example to run: those that have no result, or all where rewards compare them."""
        members = range(self.trial.rollouts_per_example)
        without = [member for member in members if (example, member) not in self.good]
        return list(members) if without and self.compares else without

    def losses(self) -> Counter[str]:
        """What is missing, by reason."""
        lost = Counter(self.failed.values())
        lost[UNFINISHED] += self.asked - len(self.good) - len(self.failed)
        return +lost


def of_evaluation(outcomes: Sequence[Outcome], pass_threshold: float) -> dict[str, float]:
    """Metrics by name, of all environments and of each. A reward from `pass_threshold` on passes."""
    good = [result for outcome in outcomes for result in outcome.good.values()]
    values = _coverage("eval", outcomes) | {"eval/rollouts": float(len(good))}
    if good:
        rewards = [result.reward for result in good]
        values |= {"eval/reward": fmean(rewards), "eval/reward_std": pstdev(rewards)}
        values["eval/mean_length"] = _mean_length(good)
    for outcome in outcomes:
        prefix = f"eval/{outcome.trial.name}"
        values |= _coverage(prefix, [outcome])
        if outcome.good:
            values |= {f"{prefix}/{name}": value for name, value in _figures(outcome, pass_threshold).items()}
    return values


def _coverage(prefix: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    asked = sum(outcome.asked for outcome in outcomes)
    good = sum(len(outcome.good) for outcome in outcomes)
    lost = sum((outcome.losses() for outcome in outcomes), Counter[str]())
    return {f"{prefix}/coverage": good / asked} | {
        f"{prefix}/failed/{why}": float(n) for why, n in lost.items()
    }


def _figures(outcome: Outcome, pass_threshold: float) -> dict[str, float]:
    examples: dict[int, list[float]] = defaultdict(list)
    for (example, _), result in outcome.good.items():
        examples[example].append(result.reward)
    summary = summarise(examples, pass_threshold, outcome.trial.rollouts_per_example)
    values = {"reward": summary.mean, "reward_std": summary.deviation}
    if summary.error is not None:
        values["reward_error"] = summary.error
    if summary.within is not None:
        values["reward_within"] = summary.within
    values |= {f"pass@{k}": value for k, value in summary.pass_at_k.items()}
    values |= {f"pass^{k}": value for k, value in summary.pass_all_k.items()}
    values["mean_length"] = _mean_length(outcome.good.values())
    for kind in ("rewards", "metrics"):
        means = means_by_name(getattr(result, kind) for result in outcome.good.values())
        # What is no number has no place in a file of JSON.
        values |= {f"{kind}/{name}": value for name, value in means.items() if isfinite(value)}
    agents = means_by_name(result.agents for result in outcome.good.values())
    return values | {f"agents/{agent}/reward": reward for agent, reward in agents.items()}


def by_agent(metrics: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """What agents earned, by the environment and their role, of the metrics of an evaluation."""
    return {
        (found[1], found[2]): value
        for name, value in sorted(metrics.items())
        if (found := _OF_AGENT.fullmatch(name)) is not None
    }


def _by_name(values: Mapping[str, float]) -> Mapping[str, float]:
    # One string for a name, however many rollouts say it.
    return {intern(name): value for name, value in values.items()}


def _mean_length(results: Iterable[Result]) -> float:
    return fmean([result.length for result in results])
