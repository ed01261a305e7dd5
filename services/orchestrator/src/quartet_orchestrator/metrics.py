"""Metrics of a step, from what was sampled and what the trainer answered.

Names follow what Weights & Biases users of RL trainers know: "train/reward", "rollout/mean_length", ... A
value that was not measured is absent, never 0. docs/runs.md lists them.

Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from quartet.run.algorithm_tables import OverlongPenaltyConfig
from quartet.run.statistics import mean, means_by_name, reaches
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout

from quartet_orchestrator.batches import covered_tokens
from quartet_orchestrator.overlong import penalty
from quartet_orchestrator.parts import have_spread, means_by_agent, members_by_role, rewards_by_role

# The trainer's diagnostics that have another name here; "train/logprob_difference_*" is what verification
# found, under equal weights.
DIAGNOSTICS = {
    "logprob_difference_mean": "mismatch_mean",
    "logprob_difference_max": "mismatch_max",
}
# Under equal weights; and below this, by its address, that of each replica (by_replica.py). No name stands
# below another: MLflow may make files of them, and folders.
DIFFERENCE = "train/logprob_difference_mean"
OF_REPLICAS = "train/logprob_difference_by_replica"

# What of an environment is over all complete groups of a step, where some of it were replaced.
SAMPLED = "sampled"
# The full reward of most environments.
SOLVED = 1.0


@dataclass(frozen=True)
class Scored:
    """A rollout of a batch, with the environment and the group that it came from."""

    env_id: str
    group: int
    rollout: Rollout


@dataclass(frozen=True)
class Losses:
    """What an environment lost on the way to a batch: attempts that failed, groups that teach too little."""

    failed: int = 0
    resampled: int = 0

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.failed + other.failed, self.resampled + other.resampled)


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step took: in all, until its batch was closed, while all was computed and the run's own
    evaluation still went on, and the rest until it was trained."""

    step_s: float
    wait_rollouts_s: float
    wait_evaluation_s: float
    train_s: float


def of_step(
    batch: int,
    scored: Sequence[Scored],
    trained: Mapping[str, float],
    times: StepTimes,
    losses: Mapping[str, Losses],
    versions_per_step: int = 1,
    overlong: OverlongPenaltyConfig | None = None,
    replaced: Sequence[Scored] = (),
) -> dict[str, float]:
    """Metrics of a step by name; what is no finite number is absent. `replaced`: of groups that teach too
    little."""
    sampled = sum(s.rollout.usage.completion_tokens for s in scored)
    values = {
        **trained,
        "rollout/failed": float(sum(one.failed for one in losses.values())),
        "rollout/resampled": float(sum(one.resampled for one in losses.values())),
        "time/step_s": times.step_s,
        "time/wait_rollouts_s": times.wait_rollouts_s,
        "time/wait_evaluation_s": times.wait_evaluation_s,
        "time/train_s": times.train_s,
    }
    if times.step_s > 0:
        values["tokens_per_second"] = sampled / times.step_s
    if overlong is not None:
        values["rollout/overlong_penalty"] = _penalty(scored, overlong)
    values |= _rewards(scored) | _shape(scored) | _staleness(batch, scored, versions_per_step)
    sampled_groups = [*scored, *replaced]
    values["rollout/reward"] = fmean([s.rollout.reward for s in sampled_groups])
    values |= _ends("rollout", sampled_groups)
    for env_id in sorted({s.env_id for s in scored} | set(losses)):
        mine = [s for s in scored if s.env_id == env_id]
        values |= _environment(f"env/{env_id}", mine, len(mine) / len(scored), losses.get(env_id, Losses()))
        if others := [s for s in replaced if s.env_id == env_id]:
            values |= _ends(f"env/{env_id}/{SAMPLED}", [*mine, *others])
    # A skipped step has a loss or a norm that is no number, and neither has JSON.
    return {name: value for name, value in values.items() if math.isfinite(value)}


def of_training(
    trained: tpb.ForwardBackwardResponse, steps: Sequence[tpb.OptimStepResponse]
) -> dict[str, float]:
    """What the trainer said of a batch, and of the optimizer steps that it took with it."""
    values = {
        "train/loss": trained.loss,
        "train/tokens": float(trained.tokens),
        "train/loss_tokens": float(trained.loss_tokens),
        "train/learning_rate": steps[-1].learning_rate,
        "train/grad_norm": fmean([one.grad_norm for one in steps]),
        "train/skipped_steps": float(sum(one.skipped_nonfinite for one in steps)),
    }
    for diagnostic, value in trained.diagnostics.items():
        values[f"train/{DIAGNOSTICS.get(diagnostic, diagnostic)}"] = value
    # From the reference policy, as everywhere; without one, from the policy that sampled.
    for diagnostic in ("reference_kl", "mismatch_kl"):
        if diagnostic in trained.diagnostics:
            values["train/kl_divergence"] = trained.diagnostics[diagnostic]
            break
    if trained.HasField("verification"):
        values["train/logprob_tokens_compared"] = float(trained.verification.tokens_compared)
        values["train/logprob_tokens_skipped"] = float(trained.verification.tokens_skipped)
    if trained.HasField("verification") and trained.verification.tokens_compared:
        values["train/logprob_difference_max"] = trained.verification.max_difference
        values[DIFFERENCE] = trained.verification.mean_difference
    return values


def over_calls(
    calls: Sequence[tpb.ForwardBackwardResponse], num_minibatches: int
) -> tpb.ForwardBackwardResponse:
    """All calls for one batch as one answer: means, the largest of maxima, of those that report it; tokens
    and verification are those of the first pass over it.
    """
    first = calls[:num_minibatches]
    whole = tpb.ForwardBackwardResponse(
        loss=mean([one.loss for one in calls]),
        tokens=sum(one.tokens for one in first),
        loss_tokens=sum(one.loss_tokens for one in first),
    )
    for name in sorted({name for one in calls for name in one.diagnostics}):
        # A loss of one's own may report a metric of some micro-batches alone.
        values = [one.diagnostics[name] for one in calls if name in one.diagnostics]
        whole.diagnostics[name] = _largest(values) if name.endswith("_max") else mean(values)
    if calls[0].HasField("verification"):
        whole.verification.CopyFrom(_verified([one.verification for one in first]))
    return whole


def _largest(values: Sequence[float]) -> float:
    """What is no number stays none, in whatever order it came."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _verified(parts: Sequence[tpb.LogprobVerification]) -> tpb.LogprobVerification:
    compared = sum(one.tokens_compared for one in parts)
    differences = sum(one.mean_difference * one.tokens_compared for one in parts)
    return tpb.LogprobVerification(
        max_difference=max(one.max_difference for one in parts),
        mean_difference=differences / compared if compared else 0.0,
        tokens_compared=compared,
        tokens_skipped=sum(one.tokens_skipped for one in parts),
    )


def _rewards(scored: Sequence[Scored]) -> dict[str, float]:
    rewards = [s.rollout.reward for s in scored]
    values = {"train/reward": fmean(rewards), "train/reward_std": pstdev(rewards)}
    for name, value in means_by_name([s.rollout.rewards for s in scored]).items():
        values[f"rewards/{name}"] = value
    for name, value in means_by_name([s.rollout.metrics for s in scored]).items():
        values[f"metrics/{name}"] = value
    return values


def _environment(prefix: str, scored: Sequence[Scored], share: float, lost: Losses) -> dict[str, float]:
    """One environment's part of a batch; it may have none."""
    values = {"share": share, "failed": float(lost.failed), "resampled": float(lost.resampled)}
    if scored:
        values |= {
            "reward": fmean([s.rollout.reward for s in scored]),
            "mean_length": fmean([covered_tokens([s.rollout]) for s in scored]),
            **_solved(scored),
        }
        # The sides of a game may earn nothing in the mean, whoever wins.
        agents = means_by_agent([s.rollout for s in scored])
        values |= {f"agents/{agent}/reward": reward for agent, reward in agents.items()}
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _ends(prefix: str, scored: Sequence[Scored]) -> dict[str, float]:
    solved = _solved(scored)
    return {f"{prefix}/{name}": solved[name] for name in ("solved_all", "solved_none")}


def _solved(scored: Sequence[Scored]) -> dict[str, float]:
    """What parts of their groups earned all, nothing, or the same."""
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for one in scored:
        groups[one.group].append(one.rollout)
    every = [[rollout.reward for rollout in group] for group in groups.values()]
    spread = [have_spread(rewards_by_role(group).values()) for group in groups.values()]
    return {
        "solved_all": fmean([float(reaches(min(rewards), SOLVED)) for rewards in every]),
        # Rewards that are all negative and differ say what is better.
        "solved_none": fmean(
            [float(max(rewards) <= 0 and not differs) for rewards, differs in zip(every, spread, strict=True)]
        ),
        "no_spread": fmean([float(not differs) for differs in spread]),
    }


def _penalty(scored: Sequence[Scored], overlong: OverlongPenaltyConfig) -> float:
    parts = [part for s in scored for role in members_by_role([s.rollout]).values() for part in role]
    return fmean([penalty(overlong, part.completion_tokens) for part in parts])


def _shape(scored: Sequence[Scored]) -> dict[str, float]:
    return {
        "rollout/mean_length": fmean([covered_tokens([s.rollout]) for s in scored]),
        "rollout/generation_time": fmean([s.rollout.timing.model_ms / 1000 for s in scored]),
        "rollout/truncated_fraction": fmean([float(s.rollout.truncated) for s in scored]),
        "rollout/turns": fmean([s.rollout.num_turns for s in scored]),
        "rollout/prefix_breaks": float(sum(s.rollout.prefix_breaks for s in scored)),
    }


def _staleness(batch: int, scored: Sequence[Scored], versions_per_step: int) -> dict[str, float]:
    spans = [
        (span.length, batch - span.policy_version // versions_per_step)
        for s in scored
        for sample in s.rollout.samples
        for span in sample.spans
    ]
    tokens = sum(length for length, _ in spans)
    return {
        "staleness/max": float(max(lag for _, lag in spans)),
        "staleness/mean": sum(length * lag for length, lag in spans) / tokens,
    }
