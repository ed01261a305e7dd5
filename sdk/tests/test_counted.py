"""How many there are, in words (counted.py), where a person is told how something ended."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.display import eval_line
from quartet.cli.ended import Ended, say_ended
from quartet.counted import counted
from quartet.v1.orchestrator_service_pb2 import EvalEvent


def test_one_of_them_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(("steps", "told"), [(1, "in 1 step, 3 s"), (2, "in 2 steps, 3 s")])
def test_a_run_that_was_completed_says_in_how_many_steps(
    capsys: pytest.CaptureFixture[str], steps: int, told: str
) -> None:
    values = {"reward_before": 0.25, "reward_after": 0.5, "wall_seconds": 3.0, "notes": []}
    assert say_ended(Mock(folder=Path("run")), Ended({"steps": steps, **values}, completed=True)) == 0
    assert f"completed: reward 0.250 -> 0.500 {told}\n" in capsys.readouterr().out


def test_an_evaluation_says_after_how_many() -> None:
    assert eval_line(EvalEvent(step=1)).startswith("evaluation after 1 step: ")
