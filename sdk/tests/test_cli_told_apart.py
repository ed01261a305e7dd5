"""Environments by the names of metrics, whatever their own figures are called."""

from __future__ import annotations

import pytest
from quartet.cli.best import coverage_of
from quartet.cli.display import eval_line
from quartet.cli.told_apart import environments
from quartet.v1.orchestrator_service_pb2 import EvalEvent

#: Of an evaluation of two, each with a reward function called "reward", one of which has a metric, too.
MEASURED = {
    "eval/reward": 0.5,
    "eval/coverage": 1.0,
    "eval/easy/reward": 0.75,
    "eval/easy/coverage": 1.0,
    "eval/easy/rewards/reward": 0.1,
    "eval/org/hard/reward": 0.25,
    "eval/org/hard/coverage": 0.5,
    "eval/org/hard/rewards/reward": 0.2,
    "eval/org/hard/metrics/a/reward": 0.3,
    "eval/org/hard/agents/red/reward": 0.4,
}


def test_environments_are_told_by_their_rewards() -> None:
    assert environments("eval", MEASURED) == {"easy", "org/hard"}
    assert environments("env", MEASURED) == set()
    assert eval_line(EvalEvent(step=3, metrics=MEASURED)).endswith("reward 0.500  easy 0.750  org/hard 0.250")


@pytest.mark.parametrize(
    ("metric", "coverage"),
    [
        ("eval/reward", 1.0),
        ("eval/org/hard/reward", 0.5),
        ("eval/org/hard/metrics/a/reward", 0.5),
        ("eval/org/hard/agents/red/reward", 0.5),
    ],
)
def test_a_figure_is_of_the_rollouts_of_its_environment(metric: str, coverage: float) -> None:
    assert coverage_of(MEASURED, metric) == coverage
