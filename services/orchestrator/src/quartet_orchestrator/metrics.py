"""Metrics of a step and of an evaluation, from what was sampled and what the trainer answered.

Names follow what Weights & Biases users of RL trainers know: "train/reward", "rollout/mean_length", ... A
value that was not measured is absent, never 0.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout

# The trainer's diagnostics that have another name here; "train/logprob_difference_*" is what verification
# found, under equal weights.
DIAGNOSTICS = {
    "mismatch_kl": "kl_divergence",
    "logprob_difference_mean": "mismatch_mean",
    "logprob_difference_max": "mismatch_max",
}


@dataclass(frozen=True)
class Scored:
    """A rollout of a batch, with the environment it came from."""

    env_id: str
    rollout: Rollout


@dataclass(frozen=True)
class StepTimes:
    step_s: float
    wait_rollouts_s: float
    train_s: float


def of_step(
    batch: int,
    scored: Sequence[Scored],
    trained: tpb.ForwardBackwardResponse,
    stepped: tpb.OptimStepResponse,
    times: StepTimes,
    failed_rollouts: int,
    versions_per_step: int = 1,
) -> dict[str, float]:
    sampled = sum(s.rollout.usage.completion_tokens for s in scored)
    values = {
        "train/loss": trained.loss,
        "train/tokens": float(trained.tokens),
        "train/loss_tokens": float(trained.loss_tokens),
        "train/learning_rate": stepped.learning_rate,
        "train/grad_norm": stepped.grad_norm,
        "train/skipped_steps": float(stepped.skipped_nonfinite),
        "rollout/failed": float(failed_rollouts),
        "time/step_s": times.step_s,
        "time/wait_rollouts_s": times.wait_rollouts_s,
        "time/train_s": times.train_s,
    }
    if times.step_s > 0:
        values["tokens_per_second"] = sampled / times.step_s
    for diagnostic, value in trained.diagnostics.items():
        values[f"train/{DIAGNOSTICS.get(diagnostic, diagnostic)}"] = value
    if trained.HasField("verification"):
        values["train/logprob_tokens_compared"] = float(trained.verification.tokens_compared)
        values["train/logprob_tokens_skipped"] = float(trained.verification.tokens_skipped)
    if trained.HasField("verification") and trained.verification.tokens_compared:
        values["train/logprob_difference_max"] = trained.verification.max_difference
        values["train/logprob_difference_mean"] = trained.verification.mean_difference
    values |= _rewards("train", scored) | _shape(scored) | _staleness(batch, scored, versions_per_step)
    # A skipped step has a loss or a norm that is no number, and neither has JSON.
    return {name: value for name, value in values.items() if math.isfinite(value)}


def over_iterations(passes: Sequence[tpb.ForwardBackwardResponse]) -> tpb.ForwardBackwardResponse:
    """All passes over one batch as one answer: means, the largest of maxima, the first's verification."""
    whole = tpb.ForwardBackwardResponse()
    whole.CopyFrom(passes[0])
    whole.loss = fmean([one.loss for one in passes])
    for name in list(whole.diagnostics):
        values = [one.diagnostics[name] for one in passes]
        whole.diagnostics[name] = max(values) if name.endswith("_max") else fmean(values)
    return whole


def of_evaluation(scored: Sequence[Scored], asked: int) -> dict[str, float]:
    """`asked` counts the rollouts that were wanted; those that failed are missing from `scored`."""
    values = {"eval/coverage": len(scored) / asked, "eval/rollouts": float(len(scored))}
    if scored:
        values |= _rewards("eval", scored)
        values["eval/mean_length"] = fmean([s.rollout.usage.completion_tokens for s in scored])
    return values


def _rewards(prefix: str, scored: Sequence[Scored]) -> dict[str, float]:
    rewards = [s.rollout.reward for s in scored]
    values = {f"{prefix}/reward": fmean(rewards), f"{prefix}/reward_std": pstdev(rewards)}
    env = "env" if prefix == "train" else prefix
    for env_id in sorted({s.env_id for s in scored}):
        values[f"{env}/{env_id}/reward"] = fmean([s.rollout.reward for s in scored if s.env_id == env_id])
    if prefix == "train":
        values |= {
            f"rewards/{name}": value for name, value in _means([s.rollout.rewards for s in scored]).items()
        }
        values |= {
            f"metrics/{name}": value for name, value in _means([s.rollout.metrics for s in scored]).items()
        }
    return values


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the tables that have it."""
    names = sorted({name for table in tables for name in table})
    return {name: fmean([table[name] for table in tables if name in table]) for name in names}


def _shape(scored: Sequence[Scored]) -> dict[str, float]:
    return {
        "rollout/mean_length": fmean([s.rollout.usage.completion_tokens for s in scored]),
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
