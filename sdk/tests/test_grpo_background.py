"""A run beside a script's thread: its result, its errors, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.asked import Interrupts
from quartet.cli.display import Plain
from quartet.grpo.background import Background
from quartet.local.child import ChildSpec
from quartet.local.supervisor import Supervisor
from quartet.scripts.waiting import wait_in_slices


def interrupts(supervisor: Supervisor | None = None) -> Interrupts:
    return Interrupts((supervisor or Supervisor([])).kill_now, Plain())


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """What a shell starts in the background, tests too, has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(after: threading.Event) -> None:
    """Once that happened; the main thread gets it."""

    def press() -> None:
        after.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


async def test_inside_a_running_loop_it_returns_and_raises_what_the_work_does() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    assert Background[int]().run(lambda: asyncio.run(answer())) == 7
    with pytest.raises(ZeroDivisionError):
        Background[float]().run(lambda: 1 / 0)


def test_the_first_ctrl_c_asks_and_the_work_ends_in_order() -> None:
    background, begun, ended = Background[str](), threading.Event(), []

    async def driven() -> str:
        asked = interrupts()
        with background.listen(asked):
            begun.set()
            await asked.asked.wait()
            await asyncio.sleep(0.05)
            ended.append("in order")
        return "stopped"

    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        background.run(lambda: asyncio.run(driven()))
    assert ended == ["in order"]


def test_the_second_ctrl_c_kills(tmp_path: Path) -> None:
    background, begun, asked_once = Background[None](), threading.Event(), threading.Event()
    port_file = tmp_path / "bound"
    command = ["sh", "-c", f"trap '' TERM; touch {port_file}; sleep 600"]
    pids: list[int] = []

    async def driven() -> None:
        supervisor = Supervisor([ChildSpec("stubborn", command, "127.0.0.1:1", tmp_path / "log", port_file)])
        asked = interrupts(supervisor)
        with background.listen(asked):
            supervisor.start()
            try:
                await supervisor.wait_bound()
                pids.append(supervisor.statuses[0].pid or 0)
                begun.set()
                await asked.asked.wait()
                asked_once.set()
                await asyncio.sleep(600)
            finally:
                await supervisor.stop(0.1)

    press_ctrl_c(begun)
    press_ctrl_c(asked_once)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        background.run(lambda: asyncio.run(driven()))
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_second_ctrl_c_while_the_first_is_told_abandons_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    background, begun, ended = Background[None](), threading.Event(), []

    async def driven() -> None:
        loop = asyncio.get_running_loop()
        tell, told = loop.call_soon_threadsafe, []

        def tell_and_press(*arguments: Any) -> asyncio.Handle:
            told.append(True)
            if len(told) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return tell(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", tell_and_press)
        with background.listen(interrupts()):
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.2)
                ended.append(len(told))

    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        background.run(lambda: asyncio.run(driven()))
    assert ended == [2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_scripts_own_decides() -> None:
    background, begun, heard = Background[str](), threading.Event(), threading.Event()
    signal.signal(signal.SIGINT, lambda *_: heard.set())

    async def driven() -> str:
        asked = interrupts()
        with background.listen(asked):
            begun.set()
            await asyncio.to_thread(heard.wait, 60)
            await asyncio.sleep(0.05)
            assert not asked.asked.is_set()
        return "to its end"

    press_ctrl_c(begun)
    assert background.run(lambda: asyncio.run(driven())) == "to its end"
    assert heard.is_set()


def test_ctrl_c_before_anything_is_driven_starts_nothing() -> None:
    background, begun, driven = Background[None](), threading.Event(), []

    async def drive() -> None:
        with background.listen(interrupts()):
            driven.append(True)

    def work() -> None:
        begun.set()
        while not background._asked:  # else the test's own limit ends it
            time.sleep(0.01)
        asyncio.run(drive())

    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        background.run(work)
    assert driven == []


def test_an_error_beside_the_run_ends_it_at_once_and_is_raised() -> None:
    """background.py 3."""
    background, ended, wrong = Background[str](), [], LookupError("of a reward function")

    async def driven() -> str:
        with background.listen(interrupts()):
            threading.Thread(target=background.end, args=(wrong,)).start()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.01)
                background.end(ValueError("a later one"))
                ended.append("in order")
        return "to its end"

    with pytest.raises(LookupError) as caught:
        background.run(lambda: asyncio.run(driven()))
    assert caught.value is wrong and ended == ["in order"]


def test_an_error_before_anything_is_driven_starts_nothing() -> None:
    background, driven, wrong = Background[None](), [], LookupError()
    background.end(wrong)

    async def drive() -> None:
        with background.listen(interrupts()):
            driven.append(True)

    with pytest.raises(LookupError):
        background.run(lambda: asyncio.run(drive()))
    assert driven == []


def test_a_run_that_has_come_to_its_end_has_come_to_it() -> None:
    background = Background[str]()

    def work() -> str:
        background.end(LookupError())
        return "to its end"

    assert background.run(work) == "to its end"


def test_the_thread_that_waits_may_do_something_else() -> None:
    """background.py 6: and is interrupted in it once the run has ended."""
    background, begun, ended = Background[str](), threading.Event(), []

    def work() -> str:
        begun.wait(60)
        return "to its end"

    def wait(event: threading.Event) -> None:
        ended.append(threading.get_ident() == threading.main_thread().ident)
        begun.set()
        event.wait(60)
        try:
            press_ctrl_c(event)
            time.sleep(60)
        except KeyboardInterrupt:
            ended.append("interrupted")

    assert background.run(work, wait) == "to its end"
    assert ended == [True, "interrupted"]


@pytest.mark.parametrize("how", ["ctrl-c", "error"])
def test_a_command_of_the_work_is_killed(how: str) -> None:
    background, wrong = Background[Any](), LookupError()
    begun = threading.Event()

    def work() -> Any:
        threading.Timer(0.05, begun.set).start()
        return background.command(["sleep", "600"])

    if how == "ctrl-c":
        press_ctrl_c(begun)
    else:
        threading.Thread(target=lambda: (begun.wait(60), background.end(wrong))).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else LookupError):
        background.run(work)
    assert time.monotonic() - began < 60
    done = Background[Any]()
    assert done.run(lambda: done.command(["echo", "said"])).stdout == "said\n"


def test_a_command_that_begins_after_the_end_is_killed() -> None:
    background, wrong = Background[Any](), LookupError()

    def work() -> Any:
        background.end(wrong)
        return background.command(["sleep", "600"])

    began = time.monotonic()
    with pytest.raises(LookupError):
        background.run(work)
    assert time.monotonic() - began < 60


def test_what_comes_after_the_end_hides_no_failure() -> None:
    """As a reward function that is still at work when the run has failed."""
    background, failed = Background[Any](), RuntimeError("failed")

    def work() -> None:
        raise failed

    def waits(ended: threading.Event) -> None:
        ended.wait(60)
        background.end(LookupError("late"))

    with pytest.raises(RuntimeError, match="failed"):
        background.run(work, waits)


def test_somebody_beside_a_run_may_stop_it_and_ctrl_c_behind_that_is_the_first() -> None:
    """background.py 4."""
    background, begun, told = Background[str](), threading.Event(), []

    async def driven() -> str:
        asked = interrupts()
        background.stop()  # before it is driven, too
        with background.listen(asked):
            await asked.asked.wait()
            background.stop()
            told.append("stops")
            begun.set()
            if presses:
                await asyncio.to_thread(pressed.wait, 60)
            await asyncio.sleep(0.05)  # a second one would cancel it here
        return "in order"

    presses, pressed = False, threading.Event()
    assert background.run(lambda: asyncio.run(driven())) == "in order"
    background, presses = Background[str](), True
    interrupt = background._interrupt

    def noted() -> None:
        interrupt()
        pressed.set()

    background._interrupt = noted  # type: ignore[method-assign]
    begun.clear()
    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        background.run(lambda: asyncio.run(driven()))
    assert told == ["stops", "stops"] and background._result == ["in order"], "it was not cancelled"


def test_a_keyboard_interrupt_that_nobody_pressed_is_an_error() -> None:
    """background.py 6."""
    background, began = Background[str](), time.monotonic()

    async def driven() -> str:
        with background.listen(interrupts()):
            await asyncio.sleep(600)
        return "to its end"

    def waits(ended: threading.Event) -> None:
        if background.ended_with is None:
            raise KeyboardInterrupt("mine")
        ended.wait(60)

    with pytest.raises(KeyboardInterrupt, match="mine"):
        background.run(lambda: asyncio.run(driven()), waits)
    assert time.monotonic() - began < 60
    done, waiting = Background[bool](), threading.Event()

    def waits_for_the_end(ended: threading.Event) -> None:
        waiting.set()
        ended.wait(60)
        raise KeyboardInterrupt("late")

    with pytest.raises(KeyboardInterrupt, match="late"):
        done.run(lambda: waiting.wait(60), waits_for_the_end)


def test_the_thread_that_waits_looks_after_something_else() -> None:
    background, looked, freed = Background[str](), [], threading.Event()

    def look() -> None:
        looked.append(threading.get_ident())
        freed.set()

    def work() -> str:
        assert freed.wait(60)
        return "to its end"

    assert background.run(work, lambda ended: wait_in_slices(ended, look)) == "to its end"
    assert set(looked) == {threading.get_ident()}


def test_a_second_ctrl_c_breaks_off_what_the_waiting_thread_does() -> None:
    """Such as a reward function that never returns; raised is it once the work has ended."""
    background, begun, freed = Background[None](), threading.Event(), threading.Event()
    broken = list[bool]()

    def press() -> None:
        begun.wait(60)
        while not background._asked:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def waits(ended: threading.Event) -> None:
        if broken:
            freed.set()
            ended.wait(60)
            return
        begun.set()
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            broken.append(freed.is_set())
            raise

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        background.run(lambda: assert_ended(freed), waits)
    assert broken == [False] and freed.is_set()


def assert_ended(freed: threading.Event) -> None:
    assert freed.wait(60)
