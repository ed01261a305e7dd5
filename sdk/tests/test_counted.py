"""How many there are, in words (counted.py), where a person is told how something ended."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.display import eval_line
from quartet.cli.ended import Ended, say_ended
from quartet.counted import counted
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import EvalEvent


def test_one_of_them_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(("steps", "told"), [(1, "in 1 step, 3 s"), (2, "in 2 steps, 3 s")])
def test_a_run_that_was_completed_says_in_how_many_steps(
    capsys: pytest.CaptureFixture[str], config: RunConfig, steps: int, told: str
) -> None:
    values = {"reward_before": 0.25, "reward_after": 0.5, "wall_seconds": 3.0, "notes": []}
    job = Mock(folder=Path("my run"), config=config)
    assert say_ended(job, Ended({"steps": steps, **values}, completed=True)) == 0
    model = "'my run/checkpoint'"
    assert capsys.readouterr().out == (
        f"completed: reward 0.250 -> 0.500 {told}\n"
        "checkpoint, metrics and figure: my run\n"
        f"talk to it: python -m quartet_inference --model {model} --openai.address 127.0.0.1:8000\n"
        f"measure it: quartet eval reverse-text -m {model}\n"
    )
    job.config = config.model_copy(update={"external_trainer": True})
    assert say_ended(job, Ended({"steps": steps, **values}, completed=True)) == 0
    assert capsys.readouterr().out.endswith("\nmetrics and figure: my run\n"), "the model is elsewhere"


def test_an_evaluation_says_after_how_many() -> None:
    assert eval_line(EvalEvent(step=1)).startswith("evaluation after 1 step: ")
