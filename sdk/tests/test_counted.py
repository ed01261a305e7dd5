"""How many there are, in words (counted.py), where a person is told how something ended."""

from __future__ import annotations

from quartet.cli.display import eval_line
from quartet.counted import counted
from quartet.v1.orchestrator_service_pb2 import EvalEvent


def test_one_of_them_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_an_evaluation_says_after_how_many() -> None:
    assert eval_line(EvalEvent(step=1)).startswith("evaluation after 1 step: ")
