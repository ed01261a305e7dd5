"""algorithm.zero_advantage_filtering: rollouts that teach nothing are in neither batch nor normaliser."""

from __future__ import annotations

import pytest
from quartet.config import ConfigError
from quartet.run.config import RunConfig, parse_run
from quartet.v1.rollout_pb2 import Rollout, Sample
from quartet_orchestrator import batches


def configured(more: str) -> RunConfig:
    return parse_run(
        'model = "m"\nbatch_size = 4\nrollouts_per_example = 2\n[[env]]\nid = "e"\n[algorithm]\n'
        f'aggregation = "token"\nzero_advantage_filtering = true\n{more}\n'
    )


def rollout(tokens: int, reward: float, *, cut: bool = False) -> Rollout:
    sample = Sample(token_ids=[1] * tokens, logprobs=[-1.0] * tokens)
    return Rollout(reward=reward, truncated=cut, samples=[sample])


def trained_on(groups: list[list[Rollout]], more: str) -> tuple[list[int], float]:
    """How many tokens each of the rollouts has, and what the loss is divided by."""
    config = configured(more)
    kept, advantages = batches.credited(config.algorithm, groups)
    assert len(kept) == len(advantages)
    return [batches.covered_tokens([one]) for one in kept], batches.normalizer(config, kept)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "max_rl"])
def test_groups_of_equal_rewards_are_left_out(advantage: str) -> None:
    groups = [[rollout(3, 0), rollout(5, 1)], [rollout(7, 1), rollout(9, 1)]]
    assert trained_on(groups, f'advantage = "{advantage}"') == ([3, 5], 8)


def test_what_a_limit_cut_goes_first() -> None:
    groups = [[rollout(3, 0), rollout(5, 1, cut=True)], [rollout(7, 1), rollout(9, 1)]]
    assert trained_on(groups, "overlong_filtering = true") == ([3], 3)


def test_a_batch_that_teaches_nothing_is_not_empty() -> None:
    groups = [[rollout(3, 1), rollout(5, 1)], [rollout(7, 0), rollout(9, 0)]]
    assert trained_on(groups, "") == ([3, 5, 7, 9], 24)


def test_it_needs_rewards_that_are_compared() -> None:
    with pytest.raises(ConfigError, match="zero_advantage_filtering looks for rewards that differ"):
        configured('advantage = "none"')
