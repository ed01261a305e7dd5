"""advantage = "gdpo": each reward function compared for itself, against the formula of arXiv 2601.05242."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.run.algorithm import AlgorithmConfig
from quartet.run.config import parse_run
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import admission, batches

SEED = 11
EPSILON = 1e-4
WEIGHTS = {"exact": 1.0, "format": 0.25, "short": -0.5}


def rollout(rewards: Mapping[str, float], reward: float = 0.0) -> Rollout:
    made = Rollout(rewards=rewards, reward=reward)
    made.samples.add(token_ids=[1, 2], logprobs=[-1.0]).spans.add(start=1, length=1)
    return made


def credited(batch: list[list[Rollout]], weights: Mapping[str, float] = {}) -> list[list[float]]:
    algorithm = AlgorithmConfig(advantage="gdpo", reward_weights=dict(weights))
    flat = iter(batches.credited(algorithm, batch)[1])
    return [[next(flat)[0] for _ in group] for group in batch]


def formula(batch: list[list[Rollout]], weights: Mapping[str, float]) -> list[np.ndarray]:
    """Equations 4 to 6: each reward normalised in its group, their weighted sum over the batch."""
    summed = []
    for group in batch:
        table = np.array([[one.rewards.get(name, np.nan) for name in weights] for one in group])
        apart = (table - np.nanmean(table, 0)) / (np.nanstd(table, 0) + EPSILON)
        summed.append(np.nansum(apart * np.array(list(weights.values())), 1))
    together = np.concatenate(summed)
    return [(one - together.mean()) / (together.std() + EPSILON) for one in summed]


@pytest.mark.parametrize("silent", [False, True])
def test_each_function_is_normalised_for_itself(silent: bool) -> None:
    """credit.py: also where a function says nothing of some rollouts."""
    rng = np.random.default_rng(SEED)
    batch = []
    for size in (2, 5, 8):
        drawn = rng.normal(size=(size, 3)) * [1.0, 100.0, 0.01] + 7
        group = [rollout(dict(zip(WEIGHTS, row, strict=True))) for row in drawn.tolist()]
        if silent:
            del group[0].rewards["format"]
        batch.append(group)
    for ours, theirs in zip(credited(batch, WEIGHTS), formula(batch, WEIGHTS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_rewards_of_equal_sums_are_told_apart() -> None:
    """What it is for: in the sum of both, these two would be alike."""
    batch = [[rollout({"exact": 1.0, "format": 0.0}, 1.0), rollout({"exact": 0.0, "format": 1.0}, 1.0)]]
    (found,) = credited(batch, {"format": 0.5})
    np.testing.assert_allclose(found, [1.0, -1.0], atol=2e-3)
    assert credited(batch) == [[0.0, 0.0]], "of equal weight, as the formula has it"


def test_what_does_not_differ_teaches_exactly_nothing() -> None:
    """credit.py 2, beside a group that does differ."""
    alike = [rollout({"exact": 0.1, "format": 0.3}) for _ in range(3)]
    differ = [rollout({"exact": float(at), "format": 0.3}) for at in range(3)]
    found = credited([alike, differ])
    assert found[0] == [0.0] * 3 and min(found[1]) < 0 < max(found[1])


def test_the_order_of_names_changes_no_bit() -> None:
    """batches.py 1"""
    rng = np.random.default_rng(SEED)
    names = [f"f{number}" for number in range(12)]
    tables = [dict(zip(names, rng.normal(size=12).tolist(), strict=True)) for _ in range(6)]
    ahead = credited([[rollout(one) for one in tables]])
    assert ahead == credited([[rollout(dict(reversed(one.items()))) for one in tables]])


def test_without_names_the_whole_reward_is_the_only_function() -> None:
    (found,) = credited([[rollout({}, 3.0), rollout({}, 1.0)]])
    np.testing.assert_allclose(found, [1.0, -1.0], atol=3e-4)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            'advantage = "grpo"\nreward_weights = { exact = 1.0 }',
            'reward_weights are read by advantage = "gdpo"',
        ),
        (
            'advantage = "gdpo"\noverlong_penalty = { from_tokens = 1, to_tokens = 2 }',
            "compares each function for itself",
        ),
        ('advantage = "gdpo"\nreward_weights = { exact = "much" }', "reward_weights.exact"),
    ],
)
def test_weights_and_penalties_that_nobody_reads_are_refused(algorithm: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(f'model = "m"\n[[env]]\nid = "e"\n[algorithm]\n{algorithm}\n')
    assert said in str(caught.value)


async def test_a_weight_of_no_function_is_refused_before_the_run() -> None:
    """admission.py: where the environments tell theirs."""

    class Hosts:
        rewards = ("exact", "format")

        async def describe(self, environment: object) -> EnvironmentInfo:
            return EnvironmentInfo(train_size=3, eval_size=3, rewards=self.rewards)

    config = parse_run(
        'model = "m"\n[[env]]\nid = "e"\n[algorithm]\nadvantage = "gdpo"\nreward_weights = { exakt = 2.0 }\n'
    )
    hosts = Hosts()
    with pytest.raises(QuartetError, match=r"reward_weights\.exakt = 2.0 .* functions are exact, format"):
        await admission.describe_environments(config, hosts)  # type: ignore[arg-type]
    hosts.rewards = ()
    assert (await admission.describe_environments(config, hosts)).train, "it tells none"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        ('advantage = "gdpo"', True),
        ('advantage = "gdpo"\nreward_weights = { exact = 2.0 }', True),
        ('advantage = "gdpo"\nreward_weights = { too_long = -0.5 }', False),
        ('advantage = "grpo"', False),
    ],
)
async def test_a_penalty_without_a_weight_is_refused_before_the_run(algorithm: str, refused: bool) -> None:
    """admission.py: gdpo would take it for a reward."""
    told = EnvironmentInfo(id="e", train_size=3, eval_size=3, rewards=["exact", "too_long"])
    told.weights.update(exact=1.0, too_long=-0.2)

    class Hosts:
        async def describe(self, environment: object) -> EnvironmentInfo:
            return told

    config = parse_run(f'model = "m"\n[[env]]\nid = "e"\n[algorithm]\n{algorithm}\n')
    with pytest.raises(QuartetError) if refused else nullcontext() as caught:
        await admission.describe_environments(config, Hosts())  # type: ignore[arg-type]
    if refused:
        assert 'algorithm.advantage = "gdpo" is refused' in str(caught.value)
        assert "'too_long'" in str(caught.value) and '"too_long" = -0.2' in str(caught.value)
