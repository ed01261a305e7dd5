"""Environments by the names of metrics, whatever their own figures are called."""

from __future__ import annotations

import io

import pytest
from quartet.cli.best import coverage_of
from quartet.cli.display import eval_line, step_line
from quartet.cli.live import figures_table
from quartet.cli.progress import Progress
from quartet.cli.told_apart import agents, environments
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_TRAINING, EvalEvent, Run
from rich.console import Console

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


#: Of a game whose sides earn nothing together, whoever wins.
GAME = {
    "train/reward": 0.0,
    "train/loss": 0.1,
    "env/game/reward": 0.0,
    "env/game/agents/o/reward": -0.25,
    "env/game/agents/x/reward": 0.25,
}


def test_of_a_game_it_is_told_what_each_side_earns() -> None:
    progress = Progress()
    progress.add_step(3, GAME)
    assert "reward 0.000 (o -0.250, x 0.250)  loss" in step_line(progress)
    progress.add_step(4, GAME | {"env/solo/reward": 0.5, "env/solo/agents/one/reward": 0.5})
    assert "reward 0.000  game 0.000 (o -0.250, x 0.250)  solo 0.500  loss" in step_line(progress)
    assert agents("env", "solo", progress.metrics) == {}, "what one agent earns is the reward"
    measured = {name.replace("env/", "eval/"): value for name, value in GAME.items()} | {"eval/reward": 0.0}
    told = eval_line(EvalEvent(step=3, metrics=measured))
    assert told == "evaluation after 3 steps: reward 0.000 (o -0.250, x 0.250)"


def test_the_live_screen_has_what_each_side_earns() -> None:
    progress = Progress(run=Run(run_id="r", phase=RUN_PHASE_TRAINING))
    progress.add_step(3, GAME)
    console = Console(width=80, file=io.StringIO())
    console.print(figures_table(progress))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "reward 0.000 of o in game -0.250 of x in game 0.250 loss" in shown
