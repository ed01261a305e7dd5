"""How many there are, in words (counted.py, rounded.py), where a person is told how something ended."""

from __future__ import annotations

import math

import pytest
from quartet.cli.compare.command import cell
from quartet.cli.display import eval_line
from quartet.cli.env.checking import _spread
from quartet.cli.rounded import rounded
from quartet.counted import counted
from quartet.v1.orchestrator_service_pb2 import EvalEvent


def test_one_of_them_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_an_evaluation_says_after_how_many() -> None:
    assert eval_line(EvalEvent(step=1)).startswith("evaluation after 1 step: ")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (9999.7, "10000"),
        (12345.0, "12345"),
        (1e12, "1e+12"),
        (math.inf, "inf"),
    ],
)
def test_a_large_number_keeps_its_digits(value: float, told: str) -> None:
    """rounded.py: rollouts of an evaluation, seconds of a day."""
    assert rounded(value) == told
    assert cell(86_449.5) == "86450", "so does compare"
    assert _spread("prompt tokens", [12_345, 12_346], "").endswith("mean 12346, most 12346")
