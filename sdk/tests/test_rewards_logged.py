"""What reward functions log (logged.py), and what is said of it."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from quartet.rewards.functions import MAX_SAID, RewardFunctions, Scores
from quartet.rewards.logged import MAX_METRICS, MAX_NAME_BYTES
from reward_groups import GROUP, failed, scores


async def test_what_is_passed_over_is_said_of_so_many_names(caplog: pytest.LogCaptureFixture) -> None:
    """MAX_SAID, and that all are silent, which is said once."""
    numbers = iter(range(1000))

    def chatty(completions: list[str], log_extra: Any, **_: Any) -> list[None]:
        for _ in range(20):
            log_extra(f"text {next(numbers)}", ["a"] * len(completions))
        return [None] * len(completions)

    functions = RewardFunctions(chatty)
    for _ in range(6):
        await functions.score(GROUP)
    said = [record.getMessage() for record in caplog.records]
    assert sum("passed over" in one for one in said) == MAX_SAID
    assert sum("answered None" in one for one in said) == 1


async def test_logged_1_a_metric_is_of_each_completion_the_mean() -> None:
    def mine(log_metric: Any, **_: Any) -> list[float]:
        for value in (1, np.float32(2), math.nan, True):
            log_metric("m", value)
        log_metric("nothing", math.nan)
        log_metric("mine", 5)
        return [0, 0]

    async def other(log_metric: Any, **_: Any) -> list[float]:
        log_metric("m", 4)
        return [0, 0]

    found = await scores([mine, other])
    assert found.metrics == [{"m": 2.0, "mine-2": 5.0}] * 2


async def test_logged_2_a_column_of_numbers_is_of_each_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def mine(log_extra: Any, **_: Any) -> list[float]:
        log_extra("n", [1, None])
        log_extra("flag", (True, False))
        log_extra("parsed", ["a", "b"])
        log_extra("short", [1])
        log_extra("late", [1])
        log_extra("late", [2])
        return [0, 0]

    functions = RewardFunctions(mine)
    with caplog.at_level(logging.WARNING, "quartet.rewards"):
        for _ in range(3):
            found = await functions.score(GROUP)
    assert isinstance(found, Scores)
    assert found.metrics == [{"n": 1.0, "flag": 1.0, "late": 1.0}, {"flag": 0.0, "late": 2.0}]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[0].startswith("what functions log as 'parsed' is passed over")


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (lambda metric, extra: metric("m", math.inf), r"log_metric\('m', inf\): it should be finite"),
        (lambda metric, extra: metric("m", "1"), "'1' is text, and no number"),
        (lambda metric, extra: metric(7, 1), "7 is no name of a metric or a column"),
        (lambda metric, extra: extra("", [1]), "'' is no name"),
        (lambda metric, extra: extra("n", 3), "'int' object is not iterable"),
    ],
)
async def test_logged_3_what_is_no_number_is_the_functions_error(log: Any, says: str) -> None:
    def mine(log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log(log_metric, log_extra)
        return [0, 0]

    found = await failed(mine)
    assert says.replace("\\", "") in found.told and "test_rewards_logged.py" in found.told


async def test_logged_4_is_bounded() -> None:
    def mine(log_metric: Any, **_: Any) -> list[float]:
        for number in range(100):
            log_metric(f"{number:03}x" + "é" * 100, number)
        return [0, 0]

    found = await scores(mine)
    assert len(found.metrics[0]) == MAX_METRICS
    assert {len(name.encode()) for name in found.metrics[0]} == {MAX_NAME_BYTES}


async def test_completions_of_which_nobody_says_anything_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    functions = RewardFunctions([lambda **_: [None, 1], lambda **_: [None, None]])
    with caplog.at_level(logging.WARNING, "quartet.rewards"):
        for _ in range(3):
            await functions.score(GROUP)
    (record,) = caplog.records
    assert record.getMessage() == (
        "all reward functions answered None, which counts as 0, of the completion 'a' to the prompt 'p'"
    )
