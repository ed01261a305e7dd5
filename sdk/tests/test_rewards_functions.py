"""Reward functions (quartet.rewards.functions, promises 1 to 4): how they are called, what of their answers
counts (answers.py, logged.py), and in which thread (turns.py, own_loop.py)."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from quartet.config import ConfigError
from quartet.rewards.answers import WrongAnswer
from quartet.rewards.functions import MAX_SAID, Failed, Group, RewardFunctions, Scores
from quartet.rewards.logged import MAX_METRICS, MAX_NAME_BYTES
from quartet.rewards.turns import Turns

GROUP = Group(
    prompts=["p", "p"],
    completions=["a", "bb"],
    completion_ids=[[1], [2, 2]],
    columns={"answer": ["x", "x"], "trainer_state": ["a column of that name", "loses"]},
)
SECONDS = 60.0


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


async def scores(functions: Any, group: Group = GROUP, **settings: Any) -> Scores:
    found = await RewardFunctions(functions, **settings).score(group)
    assert isinstance(found, Scores), found
    return found


async def failed(function: Any, group: Group = GROUP) -> Failed:
    found = await RewardFunctions(function).score(group)
    assert isinstance(found, Failed), found
    return found


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
        ([1.0], "it answered 1 numbers for 2 completions; return one for each, or None where it has nothing"),
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


async def test_promise_2_functions_have_one_thread_and_their_turns() -> None:
    """Whatever asks: no two calls at once, in the order of the list, in one thread that is not this one."""
    inside, seen = [0], list[tuple[int, str]]()

    def first(**_: Any) -> list[float]:
        inside[0] += 1
        assert inside == [1]
        seen.append((threading.get_ident(), "first"))
        return [0, 0]

    def second(**_: Any) -> list[float]:
        seen.append((threading.get_ident(), "second"))
        inside[0] -= 1
        return [0, 0]

    functions = RewardFunctions([first, second])
    found = await asyncio.gather(*(functions.score(GROUP) for _ in range(50)))
    assert all(isinstance(one, Scores) for one in found)
    assert [name for _, name in seen] == ["first", "second"] * 50
    assert {thread for thread, _ in seen} - {threading.get_ident()} == {seen[0][0]}


async def test_promise_2_a_slow_function_delays_no_coroutine_and_no_loop() -> None:
    release, began = threading.Event(), asyncio.Event()
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    threads = set[int]()

    def slow(completions: list[str], **_: Any) -> list[float]:
        loop.call_soon_threadsafe(began.set)
        assert release.wait(SECONDS)
        return [1] * len(completions)

    async def quick(completions: list[str], **_: Any) -> list[float]:
        threads.add(threading.get_ident())
        return [2] * len(completions)

    functions = RewardFunctions([slow, quick])
    quicks = RewardFunctions([quick])
    quicks._loop = functions._loop
    task = asyncio.ensure_future(functions.score(GROUP))
    await asyncio.wait_for(began.wait(), SECONDS)
    assert isinstance(await asyncio.wait_for(quicks.score(GROUP), SECONDS), Scores), "while the other is slow"
    assert not task.done()
    release.set()
    assert isinstance(await asyncio.wait_for(task, SECONDS), Scores)
    assert len(threads) == 1 and here not in threads


async def test_own_loop_1_coroutines_of_all_groups_share_a_loop_and_run_side_by_side() -> None:
    loops, barrier = set[int](), list[asyncio.Barrier]()

    async def meets(completions: list[str], **_: Any) -> list[float]:
        loops.add(id(asyncio.get_running_loop()))
        if not barrier:
            barrier.append(asyncio.Barrier(10))
        await barrier[0].wait()
        return [0] * len(completions)

    functions = RewardFunctions(meets)
    for _ in range(2):
        await asyncio.wait_for(asyncio.gather(*(functions.score(GROUP) for _ in range(10))), SECONDS)
    assert len(loops) == 1


async def test_turns_3_what_nobody_waits_for_is_not_called() -> None:
    release, began, called = threading.Event(), threading.Event(), list[str]()

    def mine(answer: list[str], **_: Any) -> list[float]:
        called.append(answer[0])
        began.set()
        assert release.wait(SECONDS)
        return [0, 0]

    functions = RewardFunctions(mine)
    tasks = [
        asyncio.ensure_future(functions.score(Group(["p"] * 2, ["a"] * 2, [[1]] * 2, {"answer": [name] * 2})))
        for name in ("first", "left", "last")
    ]
    assert await asyncio.to_thread(began.wait, SECONDS)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    release.set()
    await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), SECONDS)
    assert called == ["first", "last"]


async def test_a_coroutine_of_a_caller_who_left_is_cancelled() -> None:
    began, left = threading.Event(), threading.Event()

    async def mine(**_: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    task = asyncio.ensure_future(RewardFunctions(mine).score(GROUP))
    assert await asyncio.to_thread(began.wait, SECONDS)
    task.cancel()
    assert await asyncio.to_thread(left.wait, SECONDS)


def in_a_loop_of_its_own(work: Callable[[], Any], ended: threading.Event) -> threading.Thread:
    def run() -> None:
        asyncio.run(work())
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_turns_2_in_a_thread_that_lends_itself_signals_work() -> None:
    """What bounds its own time by SIGALRM works in the main thread alone, where TRL calls it."""
    threads = list[threading.Thread]()

    def alarmed(completions: list[str], **_: Any) -> list[float]:
        threads.append(threading.current_thread())
        signal.setitimer(signal.ITIMER_REAL, 1000)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return [1] * len(completions)

    functions, ended, found = RewardFunctions(alarmed), threading.Event(), list[Any]()

    async def twice() -> None:
        for _ in range(2):
            found.append(await functions.score(GROUP))

    thread = in_a_loop_of_its_own(twice, ended)
    functions.lend(ended)
    thread.join()
    assert all(isinstance(one, Scores) for one in found) and set(threads) == {threading.main_thread()}
    elsewhere = asyncio.run(functions.score(GROUP))
    assert isinstance(elsewhere, Failed) and "signal only works in main thread" in elsewhere.told


def test_turns_1_a_thread_that_lends_itself_waits_for_the_call_under_way() -> None:
    turns, ended = Turns(), threading.Event()
    began, release = threading.Event(), threading.Event()
    seen = list[str]()

    def first() -> None:
        seen.append("own")
        began.set()
        assert release.wait(SECONDS)
        seen.append("own ends")

    def second() -> None:
        seen.append(threading.current_thread().name)

    async def both() -> None:
        await asyncio.gather(turns.call(first), turns.call(second))

    thread = in_a_loop_of_its_own(both, ended)
    assert began.wait(SECONDS)
    threading.Timer(0.3, release.set).start()
    turns.lend(ended)
    thread.join()
    assert seen == ["own", "own ends", threading.main_thread().name]


def test_turns_2_a_second_lender_waits_and_the_own_thread_goes_on_after_them() -> None:
    turns, ended = Turns(), threading.Event()
    seen = list[str]()

    def note() -> None:
        seen.append(threading.current_thread().name)

    second = threading.Thread(target=turns.lend, args=(ended,), name="second")

    async def calls() -> None:
        second.start()
        for _ in range(20):
            await turns.call(note)

    thread = in_a_loop_of_its_own(calls, ended)
    turns.lend(ended)
    thread.join()
    second.join(SECONDS)
    assert not second.is_alive() and len(set(seen)) == 1
    asyncio.run(turns.call(note))
    assert seen[-1] == "reward functions"


def test_turns_2_the_second_lender_takes_over_where_the_first_is_done() -> None:
    turns, first_ended, ended = Turns(), threading.Event(), threading.Event()
    first = threading.Thread(target=turns.lend, args=(first_ended,), name="first")
    first.start()

    async def calls() -> list[str]:
        seen = [await turns.call(lambda: threading.current_thread().name)]
        first_ended.set()
        await asyncio.to_thread(first.join)
        while (name := await turns.call(lambda: threading.current_thread().name)) != "MainThread":
            seen.append(name)
        return seen

    seen = list[str]()
    thread = in_a_loop_of_its_own(lambda: _kept(calls(), seen), ended)
    turns.lend(ended)
    thread.join(SECONDS)
    assert "MainThread" not in seen and not thread.is_alive()


async def _kept(work: Any, seen: list[str]) -> None:
    seen += await work


async def test_turns_what_raises_is_raised_and_the_thread_goes_on() -> None:
    turns = Turns()

    def raises() -> None:
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            await turns.call(raises)
    assert await turns.call(lambda: 3) == 3


async def test_a_state_that_cannot_be_made_is_told_as_it_is() -> None:
    wrong = OSError("no file")

    def state() -> None:
        raise wrong

    found = await RewardFunctions(constant, state=state).score(GROUP)
    assert isinstance(found, Failed) and found.error is wrong and found.told == "trainer_state: no file"


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
    assert says.replace("\\", "") in found.told and "test_rewards_functions.py" in found.told


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


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (None, "reward_funcs is missing: give a function, or a list of them"),
        ([], "reward_funcs is missing"),
        (7, "reward_funcs = int is refused: give a function, or an object with __call__"),
        ([constant, Noted], r"reward_funcs\[1\] = the class Noted is refused"),
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
