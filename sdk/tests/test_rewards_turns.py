"""Which thread calls the functions of a script, and when: turns.py, own_loop.py, and functions.py 2."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments
from quartet.rewards.functions import Failed, Group, RewardFunctions, Scores
from quartet.rewards.instances import Instances
from quartet.rewards.own_loop import OwnLoop
from quartet.rewards.own_tools import Tools
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2
from reward_groups import GROUP, SECONDS


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
    quicks.loop = functions.loop
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


def in_a_loop_of_its_own(
    work: Callable[[], Any], ended: threading.Event, once_lent: Turns | None = None
) -> threading.Thread:
    def run() -> None:
        while once_lent is not None and not once_lent._is_lent:
            time.sleep(0.01)
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

    thread = in_a_loop_of_its_own(twice, ended, functions.turns)
    functions.lend(ended)
    thread.join()
    assert all(isinstance(one, Scores) for one in found) and set(threads) == {threading.main_thread()}
    elsewhere = asyncio.run(functions.score(GROUP))
    assert isinstance(elsewhere, Failed) and "signal only works in main thread" in elsewhere.told


def test_turns_2_a_thread_that_lends_itself_looks_after_something_else() -> None:
    """Between calls, where there are none, and where another thread is lent."""
    turns, ended, enough = Turns(), threading.Event(), threading.Event()
    looked = list[str]()

    def look() -> None:
        looked.append(threading.current_thread().name)
        if {"MainThread", "second"} <= set(looked):
            enough.set()

    second = threading.Thread(target=turns.lend, args=(ended, look), name="second")

    async def calls() -> None:
        second.start()
        try:
            await turns.call(lambda: None)
            assert await asyncio.to_thread(enough.wait, SECONDS)
            before = len(looked)
            for _ in range(20):
                await turns.call(lambda: None)
            assert len(looked) >= before + 19
            done.append(True)
        finally:
            ended.set()

    done = list[bool]()
    thread = in_a_loop_of_its_own(calls, ended)
    turns.lend(ended, look)
    thread.join()
    second.join(SECONDS)
    assert done == [True]


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

    thread = in_a_loop_of_its_own(calls, ended, turns)
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


async def test_turns_5_what_does_not_return_is_known() -> None:
    """Of a script with environments the factory, reset, methods and tools, each with its row; also where they
    are called one after another."""
    turns, heard = Turns(), list[str]()

    class Room:
        def __init__(self) -> None:
            heard.append(turns.held_by[0])

        def reset(self, **_: Any) -> None:
            heard.append(turns.held_by[0])

        def push(self) -> str:
            """Pushes."""
            heard.append(turns.held_by[0])
            return ""

    def plain() -> str:
        """Is plain."""
        heard.append(turns.held_by[0])
        time.sleep(0.01)
        assert 0.01 <= turns.held_by[1] < SECONDS
        return ""

    environments = Environments(Room)
    tools = Tools([plain], turns, OwnLoop(), environments.methods)
    tokenizer: Any = None
    kept = Instances(environments, turns, Conversation(tools, tokenizer))
    assert await kept.open("a", 0, {}, "train_dataset[3]") == ""
    called = [common_pb2.ToolCall(name=name) for name in ("push", "plain", "quux")]
    asked = [common_pb2.Message(role="assistant", tool_calls=called)]
    assert not isinstance(await kept.after("a", 0, asked, 1), Failed)
    assert heard == [
        "",
        "environment_factory for train_dataset[3]",
        "method 'reset' of Room for train_dataset[3]",
        "method 'push' of Room for train_dataset[3]",
        "tool 'plain' for train_dataset[3]",
    ]
    assert await turns.call(lambda: turns.held_by[0]) == "", "none of them is called any more"


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


def test_turns_2_a_lent_thread_that_lends_itself_again_goes_on_with_the_calls() -> None:
    """As where a callback has something measured by the same functions."""
    turns, ended, measured = Turns(), threading.Event(), threading.Event()
    threads, looks = list[int](), list[int]()

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            turns.lend(measured)

    async def calls() -> None:
        for _ in range(3):
            await asyncio.wait_for(turns.call(lambda: threads.append(threading.get_ident())), SECONDS)
        measured.set()
        await asyncio.wait_for(turns.call(lambda: threads.append(threading.get_ident())), SECONDS)

    thread = in_a_loop_of_its_own(calls, ended, turns)
    turns.lend(ended, look)
    thread.join()
    assert threads == 4 * [threading.get_ident()]


async def test_own_loop_3_the_loop_outlives_what_a_task_raises() -> None:
    """Of a task of a function's own, which asyncio would let out of the loop."""
    loop = OwnLoop()

    async def inner() -> None:
        raise SystemExit("a function that thinks it is a program")

    async def gathers() -> None:
        await asyncio.gather(inner())

    async def healthy() -> int:
        return 7

    with pytest.raises(RuntimeError, match="SystemExit: a function that thinks"):
        await asyncio.wait_for(loop.call(gathers), SECONDS)
    assert await asyncio.wait_for(loop.call(healthy), SECONDS) == 7


@pytest.mark.parametrize(("how", "code"), [("raise SystemExit(3)", 3), ("raise KeyError", 1), ("pass", 0)])
def test_turns_4_a_process_that_a_function_forked_is_no_script(tmp_path: Path, how: str, code: int) -> None:
    """In a process of its own: in this one a fork would be the tests, too."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import asyncio, os
from quartet.rewards.functions import Group, RewardFunctions

def forks(completions, **_):
    if (child := os.fork()) == 0:
        {how}
        return [5.0]
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]

def behind(completions, **_):
    print("once", flush=True)
    return [0.0]

print(asyncio.run(RewardFunctions([forks, behind]).score(Group(["p"], ["c"], [[1]]))).values, flush=True)
""")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == f"once\n[[{code:.1f}], [0.0]]\n", done.stderr


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise KeyError", 1),
        ("pass", 0),
        # Without an end here it would go on in the script's loop, by that one's descriptors.
        ("await asyncio.sleep(0)", 1),
        ("await asyncio.sleep(60)", 1),
    ],
)
def test_own_loop_4_a_process_that_a_coroutine_forked_is_no_script(
    tmp_path: Path, how: str, code: int
) -> None:
    """Of a reward function, a task of its own, and a tool; and the loop goes on."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import asyncio, os
from quartet.rewards.functions import Group, RewardFunctions
from quartet.rewards.own_tools import Tools
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2

async def forks():
    "Forks."
    await asyncio.sleep(0)
    if (child := os.fork()) == 0:
        {how}
        return 5.0
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

async def straight(completions, **_):
    return [await forks()]

async def gathers(completions, **_):
    return await asyncio.gather(forks())

async def behind(completions, **_):
    await asyncio.sleep(0.01)
    print("once", flush=True)
    return [0.0]

async def main():
    functions = RewardFunctions([straight, gathers, behind])
    for _ in range(2):
        print((await functions.score(Group(["p"], ["c"], [[1]]))).values, flush=True)
    call = common_pb2.ToolCall(id="1", name="forks", arguments_json="{{}}")
    asked = common_pb2.Message(role="assistant", tool_calls=[call])
    print([one.content for one in await Tools([forks], Turns(), functions.loop).answer(asked)], flush=True)

asyncio.run(main())
""")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    scored = f"once\n[[{code:.1f}], [{code:.1f}], [0.0]]\n"
    assert done.stdout == 2 * scored + f"['{code:.1f}']\n", done.stderr
