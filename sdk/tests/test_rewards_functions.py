"""Reward functions (quartet.rewards.functions, promises 1, 3 and 4): how they are called, and what of their
answers counts (answers.py)."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from quartet.config import ConfigError
from quartet.rewards.answers import WrongAnswer
from quartet.rewards.functions import Failed, RewardFunctions, Scores
from reward_groups import GROUP, SECONDS, constant, failed, scores


async def test_promise_1_by_keywords_with_the_columns() -> None:
    seen: list[dict[str, Any]] = []

    def spy(**keywords: Any) -> list[int]:
        seen.append(keywords)
        return [0, 0]

    async def other(**keywords: Any) -> list[int]:
        return spy(**keywords)

    state = object()
    await scores([spy, other], state=lambda: state)
    first, second = seen
    assert (
        first.keys()
        == second.keys()
        == {
            *(
                "prompts",
                "completions",
                "completion_ids",
                "answer",
                "trainer_state",
                "log_extra",
                "log_metric",
            )
        }
    )
    assert first["prompts"] is second["prompts"] is GROUP.prompts
    assert first["trainer_state"] is second["trainer_state"] is state
    assert (first["answer"], first["completions"], first["completion_ids"]) == (
        ["x", "x"],
        GROUP.completions,
        GROUP.completion_ids,
    )
    await scores(spy)
    assert seen[-1]["trainer_state"] is None


class Noted:
    """An object with __call__."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self.weight for _ in completions]


class Awaited:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [2.0 for _ in completions]


def test_promise_4_names_are_those_of_trl_and_each_has_one() -> None:
    from trl.trainer.utils import get_callable_name, is_async_callable

    partial = functools.partial(functools.partial(constant, answer=1), more=2)
    given = [constant, partial, Noted(), Noted(), Awaited(), functools.partial(Awaited()), lambda **_: []]
    named = RewardFunctions(given)
    assert named.names == (
        *("constant", "constant-2", "Noted", "Noted-2", "Awaited", "Awaited-2", "<lambda>"),
    )
    for one, function in zip(named.functions, given, strict=True):
        assert one.name.partition("-")[0] == get_callable_name(function)
        assert one.is_async == is_async_callable(function)
    assert [one.is_async for one in named.functions] == [False] * 4 + [True] * 2 + [False]


async def test_every_kind_of_callable_is_called() -> None:
    found = await scores([Noted(3.0), Awaited(), functools.partial(Noted.__call__, Noted(4.0)), constant])
    assert [list(values) for values in found.values] == [[3, 3], [2, 2], [4, 4], [1, 1]]


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([True, None], [1.0, None]),
        ((0, -1), [0.0, -1.0]),
        (np.array([0.5, 1.5], np.float32), [0.5, 1.5]),
        ([np.float16(0.5), np.int64(3)], [0.5, 3.0]),
        ([Decimal("0.5"), np.bool_(True)], [0.5, 1.0]),
        ((n for n in (1, 2)), [1.0, 2.0]),
        (range(2), [0.0, 1.0]),
    ],
)
async def test_answers_that_are_taken(answer: Any, values: list[float | None]) -> None:
    found = await scores(lambda **_: answer)
    assert found.values == [values]
    assert all(type(value) in (float, type(None)) for value in found.values[0])


async def test_tensors_are_taken() -> None:
    import torch

    found = await scores(
        [lambda **_: torch.tensor([1.0, 2.0]), lambda **_: [torch.tensor(3), torch.tensor([4])]]
    )
    assert found.values == [[1.0, 2.0], [3.0, 4.0]]
    told = (await failed(lambda **_: torch.ones(2, 2))).told
    assert "of completion 0 it answered tensor([1., 1.]); return a number" in told


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1.0], "it answered 1 number for 2 completions; return one for each, or None where it has nothing"),
        ([1, 2, 3], "it answered 3 numbers for 2 completions"),
        (
            [1, math.nan],
            "of completion 1 it answered nan; return a finite number, or None where it has nothing",
        ),
        ([-math.inf, 1], "of completion 0 it answered -inf; return a finite number"),
        ([1, "2"], "of completion 1 it answered '2'; return a number, or None where it has nothing to say"),
        ([1, [2]], "of completion 1 it answered [2]; return a number"),
        ([1, 1j], "of completion 1 it answered 1j; return a number"),
        ([1, 10**400], "of completion 1 it answered 1000"),
        (1.0, "it answered 1.0; return a list of 2 numbers, one for each completion"),
        (None, "it answered None; return a list of 2 numbers"),
        ("ab", "it answered 'ab'; return a list of 2 numbers"),
        ({"a": 1, "b": 2}, "it answered {'a': 1, 'b': 2}; return a list"),
        (np.float32(1), "it answered np.float32(1.0); return a list of 2 numbers"),
    ],
)
async def test_promise_3_answers_that_are_none(answer: Any, says: str) -> None:
    def mine(**_: Any) -> Any:
        return answer

    found = await failed(mine)
    line = mine.__code__.co_firstlineno
    assert found.told.startswith(f"reward function 'mine' (test_rewards_functions.py:{line}): {says}")
    assert isinstance(found.error, WrongAnswer) and str(found.error) == found.told
    assert isinstance(found.error, ValueError) and found.function == "mine"


async def test_promise_3_what_a_function_raises_is_told_with_its_place() -> None:
    def inner(answer: str) -> float:
        raise KeyError(answer)

    def mine(answer: list[str], **_: Any) -> list[float]:
        return [inner(one) for one in answer]

    async def other(answer: list[str], **_: Any) -> list[float]:
        return mine(answer)

    def lazy(answer: list[str], **_: Any) -> Iterator[float]:
        yield from mine(answer)

    place = f"/test_rewards_functions.py:{inner.__code__.co_firstlineno + 1} in inner: KeyError: 'x'"
    for function in (mine, other, lazy):
        found = await failed(function)
        assert found.told == f"reward function '{function.__name__}': tests{place}"
        assert type(found.error) is KeyError and found.error.__traceback__ is not None


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()]
)
async def test_promise_3_whatever_it_is(raised: BaseException) -> None:
    def mine(**_: Any) -> None:
        raise raised

    async def other(**_: Any) -> None:
        raise raised

    assert (await failed(mine)).error is raised
    error = (await failed(other)).error
    assert error is raised or (isinstance(raised, StopIteration) and error.__cause__ is raised)


async def test_promise_3_the_first_that_fails_is_not_waited_beyond() -> None:
    left: list[str] = []

    async def slow(**_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("slow")

    def wrong(**_: Any) -> list[float]:
        return []

    functions = RewardFunctions([slow, wrong])
    found = await asyncio.wait_for(functions.score(GROUP), SECONDS)
    assert isinstance(found, Failed) and found.function == "wrong"
    again = await asyncio.wait_for(RewardFunctions([constant]).score(GROUP), SECONDS)
    assert isinstance(again, Scores)
    async with asyncio.timeout(SECONDS):
        while not left:  # noqa: ASYNC110 - it ends on another loop
            await asyncio.sleep(0.01)


async def test_a_state_that_cannot_be_made_is_told_as_it_is() -> None:
    wrong = OSError("no file")

    def state() -> None:
        raise wrong

    found = await RewardFunctions(constant, state=state).score(GROUP)
    assert isinstance(found, Failed) and found.error is wrong and found.told == "trainer_state: no file"


class Raising:
    """Raises whatever it is asked for."""

    def __call__(self, **_: Any) -> list[float]:
        return []

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (None, "reward_funcs is missing: give a function, or a list of them"),
        ([], "reward_funcs is missing"),
        (7, "reward_funcs = int is refused: give a function, or an object with __call__"),
        ([constant, Noted], r"reward_funcs\[1\] = the class Noted is refused"),
        (
            [constant, Raising()],
            r"reward_funcs\[1\] = Raising is refused: looked at, it raises KeyError: '__na",
        ),
        (
            "models/reward",
            r"reward_funcs = 'models/reward' is refused: load that reward model.*num_labels=1\)$",
        ),
    ],
)
def test_what_is_no_function_is_refused(functions: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        RewardFunctions(functions)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0], "reward_weights has 1 numbers for 2 reward functions; give one for each"),
        (
            [1, math.nan],
            r"reward_weights\[1\] = nan is refused: give a number within 1e\+09 \(0 makes a metric\)",
        ),
        ([1, 10**400], r"reward_weights\[1\] = 1000"),
        (3, "reward_weights = 3 is refused: give a list"),
        ([-math.inf, 1], r"reward_weights\[0\] = -inf is refused"),
        (["1", 1], r"reward_weights\[0\] = '1' is refused"),
        ([True, 1], r"reward_weights\[0\] = True is refused"),
    ],
)
def test_weights_are_finite_numbers_one_for_each(weights: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        RewardFunctions([constant, Noted()], weights)
    assert [one.weight for one in RewardFunctions([constant, Noted()], [0, -2]).functions] == [0.0, -2.0]
    assert [one.weight for one in RewardFunctions((constant, Noted())).functions] == [1.0, 1.0]


def test_a_function_that_cannot_take_what_it_is_given_is_refused_beforehand() -> None:
    def strict(prompts: list[str], completions: list[str]) -> list[float]:
        return []

    def wants(completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return []

    line = strict.__code__.co_firstlineno
    with pytest.raises(ConfigError) as caught:
        RewardFunctions([constant, strict]).check(["answer"])
    assert str(caught.value) == (
        f"reward function 'strict' (test_rewards_functions.py:{line}) cannot be called with prompts, "
        "completions, completion_ids, trainer_state, log_extra, log_metric, answer: got an unexpected "
        "keyword argument 'completion_ids'; add **kwargs to what it takes, and name only columns that the "
        "rows have"
    )
    with pytest.raises(ConfigError, match=r"'wants' .*: missing a required argument: 'solution'; add"):
        RewardFunctions(wants).check(["answer"])
    RewardFunctions([wants, constant, Noted(), Awaited(), max]).check(["answer", "solution"])


def test_the_digest_changes_with_what_they_are() -> None:
    def other(completions: list[str], **_: Any) -> list[float]:
        return [2.0] * len(completions)

    def digest(functions: Any, weights: Any = None) -> str:
        return RewardFunctions(functions, weights).digest

    changed = functools.partial(other)
    other.__name__ = "constant"
    found = [
        digest(constant),
        digest(constant, [2]),
        digest(changed),
        digest([constant, constant]),
        digest(max),
    ]
    assert len(set(found)) == len(found)
    assert digest(constant) == digest(constant, [1.0]) == digest(functools.partial(constant))
