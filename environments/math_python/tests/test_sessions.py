"""The sessions of math-python's tool: apart, limited, and gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import tempfile
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import episodes_by_hand
import math_python
from math_python.server import PythonConfig, PythonState, PythonToolset, close
from math_python.sessions import LOOK_SECONDS, MAX_PROCESSES, NEW_SESSION, Limits, Sessions

MIB = 1 << 20


taskset = partial(episodes_by_hand.taskset, "math-python")


class Tool(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        limits = Limits(call_seconds=60.0, memory_bytes=256 * MIB, output_chars=200, max_sessions=3)
        self.sessions = await self.enterAsyncContext(Sessions(limits).open())

    def allow(self, seconds: float) -> None:
        """For each call from now on; a machine that is slow stops what ends by itself, too."""
        limits = self.sessions._limits.model_copy(update={"call_seconds": seconds})
        self.enterContext(unittest.mock.patch.object(self.sessions, "_limits", limits))

    async def said(self, code: str, key: str = "a") -> str:
        return (await self.sessions.run(key, code)).output

    async def test_names_stay_and_sessions_are_apart(self) -> None:
        self.assertEqual(await self.said("x = 20\nprint('hello')\nx + 1"), "hello\n21")
        self.assertEqual(await self.said("x += 1; x"), "21")
        self.assertEqual(await self.said("None"), "")
        self.assertIn("NameError", await self.said("x", "b"))
        self.sessions.end("a")
        self.assertIn("NameError", await self.said("x"))

    async def test_errors_are_told_and_the_session_lives(self) -> None:
        await self.said("x = 1")
        answer = await self.sessions.run("a", "y = 2\nx / 0")
        self.assertTrue(answer.error)
        self.assertIn("line 2", answer.output)
        self.assertIn("ZeroDivisionError", answer.output)
        self.assertNotIn("nursery", answer.output)
        for code, why in (("def f(:", "SyntaxError"), ("import sys; sys.exit(3)", "SystemExit"),
                          ("input()", "EOFError"), ("raise KeyboardInterrupt", "Keyboard")):  # fmt: skip
            self.assertIn(why, await self.said(code))
        self.assertEqual(await self.said("x, y"), "(1, 2)")

    async def test_what_no_message_can_carry_is_replaced(self) -> None:
        self.assertEqual(await self.said("print('a' + chr(0xD800))"), "a?")
        self.assertTrue((await self.said("raise ValueError(chr(0xDFFF))")).endswith("ValueError: ?"))

    async def test_a_copy_that_the_code_makes_of_itself_answers_nothing(self) -> None:
        self.assertEqual(await self.said("import os\n'parent' if os.fork() else 'child'"), "'parent'")
        await asyncio.sleep(0.2)
        self.assertEqual(await self.said("3"), "3")

    async def test_code_that_copies_itself_without_end_is_ended_alone(self) -> None:
        self.enterContext(unittest.mock.patch("math_python.sessions.MAX_PROCESSES", 40))
        await self.said("x = 1", "b")
        endless = "import os, time\nwhile True:\n  os.fork() or time.sleep(600)\n  time.sleep(0.002)"
        self.assertIn("memory or processes than it may", await self.said(endless))
        self.assertEqual(await self.said("x", "b"), "1")
        few = "for _ in range(20):\n  os.fork() or time.sleep(600)\ntime.sleep(1)"
        self.assertEqual(await self.said(f"import os, time\n{few}"), NEW_SESSION)

    async def test_sessions_that_started_nothing_are_ended_by_no_look(self) -> None:
        self.enterContext(unittest.mock.patch("math_python.sessions.MAX_PROCESSES", 1))
        for key in "ab":
            await self.said("x = 1", key)
        await asyncio.sleep(3 * LOOK_SECONDS)
        self.assertEqual([await self.said("x", key) for key in "ab"], ["1", "1"])

    async def test_calls_that_wait_for_others_keep_their_time(self) -> None:
        self.allow(2)
        with unittest.mock.patch.object(self.sessions, "_running", asyncio.Semaphore(1)):
            calls = [self.said(f"import time; time.sleep(0.8); {key!r}", key) for key in "abc"]
            self.assertEqual(await asyncio.gather(*calls), ["'a'", "'b'", "'c'"])

    async def test_limits(self) -> None:
        self.assertIn("MemoryError", await self.said("'a' * (1 << 30)"))
        self.assertEqual(await self.said("print('y' * 1000)"), "y" * 200 + "\n... (801 characters more)")
        self.assertIn("File too large", await self.said("open('big', 'w').write('x' * (1 << 22))"))
        self.assertIn("longer than", await self.said("#" * (2 << 20)))
        self.allow(1)
        started = time.monotonic()
        self.assertEqual(await self.said("x = 1\nwhile True: pass"), "error: Python was stopped after 1 s")
        self.assertLess(time.monotonic() - started, 10)
        self.allow(60)
        self.assertEqual(await self.said("1 + 1"), f"{NEW_SESSION}2")
        self.assertIn("ended", await self.said("import os; os._exit(0)"))
        self.assertIn("NameError", await self.said("x"))

    async def test_one_session_that_hangs_does_not_hold_up_another(self) -> None:
        stuck = asyncio.create_task(self.said("while True: pass", "stuck"))
        await until(lambda: "stuck" in self.sessions._live)
        await self.said("1", "b")
        self.assertEqual(await self.said("2", "b"), "2")
        self.assertFalse(stuck.done())
        stuck.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await stuck

    async def test_the_longest_idle_session_makes_room(self) -> None:
        for key in "abcd":
            await self.said("x = 1", key)
        self.assertEqual(len(self.sessions._live), 3)
        self.assertTrue((await self.said("x", "a")).startswith(NEW_SESSION))
        self.assertEqual(await self.said("x", "d"), "1")

    async def test_isolation(self) -> None:
        if not self.sessions.isolated:
            self.skipTest("this kernel gives no namespaces")
        connect = "socket.create_connection(('1.1.1.1', 53), 1)"
        code = f"import socket\ntry:\n  {connect}\nexcept OSError as e:\n  print(e)"
        self.assertIn("unreachable", await self.said(code))
        self.assertIn("Read-only", await self.said("open('/usr/x', 'w')"))
        # Beside them is the interpreter, where it lies in the machine's /tmp.
        files = "import os; [one.name for one in os.scandir('/tmp') if one.is_file()]"
        self.assertEqual(await self.said(f"open('/tmp/x', 'w').write('1'); {files}"), "['x']")
        self.assertEqual(await self.said(f"{files}, os.getpid()", "b"), "([], 1)")

    async def test_a_session_sees_nothing_of_the_machine_from_which_answers_could_be_read(self) -> None:
        if not self.sessions.isolated:
            self.skipTest("this kernel gives no namespaces")
        with tempfile.NamedTemporaryFile(dir=Path.home(), suffix=".jsonl") as file:
            for hidden in (file.name, math_python.__file__, "/etc/passwd"):
                self.assertTrue(os.path.exists(hidden))  # noqa: ASYNC240 - a look, in a test
                self.assertEqual(await self.said(f"import os\nos.path.exists({hidden!r})"), "False")
        self.assertIn("ModuleNotFoundError", await self.said("import math_python"))
        code = "import os\n{name for name in os.listdir('/proc') if name.isdigit()} <= {'1'}"
        self.assertEqual(await self.said(code), "True")

    async def test_this_package_is_empty_where_it_lies_among_those_that_are_shown(self) -> None:
        async with Sessions(Limits(packages=["math_python"])).open() as sessions:
            if not sessions.isolated:
                self.skipTest("this kernel gives no namespaces")
            folder = str(Path(math_python.__file__).parent)
            answer = await sessions.run("a", f"import os\nos.listdir({folder!r})")
            self.assertEqual(answer.output, "[]")

    async def test_programs_and_the_interpreter_are_there(self) -> None:
        code = "import subprocess, sys\nsubprocess.check_output([sys.executable, '-c', 'print(7)'])"
        self.allow(60)
        self.assertEqual(await self.said(code), r"b'7\n'")
        self.assertIn("hello", await self.said("subprocess.check_output(['sh', '-c', 'echo hello'])"))

    async def test_the_end_of_a_session_is_the_end_of_what_it_started(self) -> None:
        if not self.sessions.isolated:
            self.skipTest("this kernel gives no namespaces")
        mark = f"quartet-mark-{time.time_ns()}"
        code = f"import os\nif os.fork() == 0:\n  os.setsid(); os.execvp('sleep', ['{mark}', '1000'])\n1"
        self.assertEqual(await self.said(code), "1")
        await until(lambda: running(mark))
        self.sessions.end("a")
        await until(lambda: not running(mark))


class Ends(unittest.IsolatedAsyncioTestCase):
    async def test_none_is_lost_where_many_rollouts_end_at_once(self) -> None:
        """The server is busy meanwhile; its session would be there for an hour."""
        closer, names = f"math-python-test-{os.getpid()}", [f"session {number}" for number in range(40)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.bind(f"\0{closer}")
            line.setblocking(False)
            ends = asyncio.gather(*(close(PythonState(session=name, closer=closer)) for name in names))
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                receive = partial(asyncio.get_running_loop().sock_recv, line, 64)
                told = [(await receive()).decode() for _ in names]
                await ends
        self.assertEqual(sorted(told), sorted(names))
        await close(PythonState(session="a", closer=closer))  # of a server that is gone

    async def test_a_session_that_nobody_ended_is_ended(self) -> None:
        async with Sessions(Limits(memory_bytes=256 * MIB, idle_seconds=0.3)).open() as sessions:
            await sessions.run("a", "x = 1")
            await until(lambda: not sessions._live)
            self.assertTrue((await sessions.run("a", "x")).output.startswith(NEW_SESSION))

    async def test_a_nursery_that_dies_is_replaced(self) -> None:
        async with Sessions(Limits(memory_bytes=256 * MIB)).open() as sessions:
            await sessions.run("a", "x = 1")
            (nursery,) = children(os.getpid())
            session = process_folder(sessions._live["a"].pidfd)
            os.kill(nursery, signal.SIGKILL)
            await until(lambda: not session.exists())
            self.assertIn("ended", (await sessions.run("a", "x")).output)
            self.assertEqual((await sessions.run("a", "2")).output, f"{NEW_SESSION}2")
            self.assertEqual((await sessions.run("b", "3")).output, "3")

    async def test_a_cancelled_call_does_not_answer_the_next(self) -> None:
        async with Sessions(Limits(memory_bytes=256 * MIB)).open() as sessions:
            slow = asyncio.create_task(sessions.run("a", "import time; time.sleep(60); 'late'"))
            await until(lambda: "a" in sessions._live)
            await asyncio.sleep(0.2)
            slow.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await slow
            self.assertEqual((await sessions.run("a", "2")).output, f"{NEW_SESSION}2")

    async def test_cancelled_calls_leave_no_locks(self) -> None:
        async with Sessions(Limits(memory_bytes=256 * MIB, max_sessions=4)).open() as sessions:
            for number in range(4):
                key = f"rollout {number}"
                calls = [asyncio.create_task(sessions.run(key, "import time; time.sleep(60)")) for _ in "ab"]
                if number % 2:  # at work; else while it begins
                    await until(lambda key=key: key in sessions._live)
                else:
                    await asyncio.sleep(0)
                self.assertIn(key, sessions._locks)
                for call in calls:
                    call.cancel()
                ended = await asyncio.gather(*calls, return_exceptions=True)
                self.assertTrue(all(isinstance(one, asyncio.CancelledError) for one in ended), ended)
                del call, calls, ended
            self.assertEqual((await sessions.run("other", "1")).output, "1")
            gc.collect()  # the errors that were told here hold what they passed
            self.assertEqual(list(sessions._locks), [])

    async def test_a_session_cancelled_while_it_begins_leaves_nothing_to_the_next(self) -> None:
        """sessions.py 6: the next has its own process, and neither process nor descriptor is left over."""
        receive, slow, go_on = socket.recv_fds, [True], threading.Event()

        def late(*arguments: Any) -> Any:
            if slow:
                slow.clear()
                go_on.wait(60)
            return receive(*arguments)

        limits = Limits(memory_bytes=256 * MIB, isolate=False)
        async with Sessions(limits).open() as sessions:
            await sessions.run("first", "1")
            (nursery,) = children(os.getpid())
            before = len(os.listdir("/proc/self/fd")) - 2  # a session has a socket and a handle
            sessions.end("first")
            # Its socket is closed in a later turn of the loop.
            await until(lambda: len(os.listdir("/proc/self/fd")) == before)
            with unittest.mock.patch("socket.recv_fds", late):
                begun = asyncio.create_task(sessions.run("cancelled", "1"))
                await until(lambda: not slow)
                begun.cancel()
                asyncio.get_running_loop().call_later(0.4, go_on.set)  # while the next one begins
                with self.assertRaises(asyncio.CancelledError):
                    await begun
                own = (await sessions.run("b", "import os; os.getpid()")).output
            folder = process_folder(sessions._live["b"].pidfd)
            self.assertEqual(folder.name, own)
            sessions.end("b")
            await until(lambda: not folder.exists())
            await until(lambda: not sessions._beginning and len(os.listdir("/proc/self/fd")) == before)
            await until(lambda: not told(Path(f"/proc/{nursery}/task/{nursery}/children")))

    async def test_there_are_never_more_than_the_limit(self) -> None:
        """sessions.py 3: also when all are busy, when many begin at once, and when some give up."""
        async with Sessions(Limits(memory_bytes=256 * MIB, max_sessions=2)).open() as sessions:
            short, long = (f"import time; time.sleep({seconds}); 7" for seconds in (0.2, 60))
            given_up = "bf"  # one that is at work, however slow this test is, and one that waits
            asked = {key: long if key in given_up else short for key in "abcdefgh"}
            runs = [asyncio.create_task(sessions.run(key, code)) for key, code in asked.items()]
            await until(lambda: "b" in sessions._live)
            runs[5].cancel()
            runs[1].cancel()
            while not all(one.done() for one in runs):
                self.assertLessEqual(len(sessions._live) + len(sessions._beginning), 2)
                await asyncio.sleep(0.005)
            ended = await asyncio.gather(*runs, return_exceptions=True)
            self.assertEqual([one.output for one in ended if not isinstance(one, BaseException)], ["7"] * 6)

    def test_a_worker_has_room_for_all_of_them(self) -> None:
        """By default: of the 512 processes that a host allows it, and with 256 rollouts at once."""
        most = taskset().config.tool.limits.max_sessions
        self.assertTrue(256 < most < MAX_PROCESSES < 512 - 16, most)

    async def test_nothing_is_left_at_the_end(self) -> None:
        async with Sessions(Limits(memory_bytes=256 * MIB)).open() as sessions:
            await sessions.run("a", "1")
            folder = process_folder(sessions._live["a"].pidfd)
            await until(lambda: folder.exists())
        await until(lambda: not folder.exists())


class WithoutNamespaces(unittest.IsolatedAsyncioTestCase):
    async def test_the_limits_hold_there_too(self) -> None:
        limits = Limits(memory_bytes=256 * MIB, call_seconds=1.0, isolate=False)
        async with Sessions(limits).open() as sessions:
            self.assertFalse(sessions.isolated)
            copied = await sessions.run("copied", "import os, time\nos.fork() or time.sleep(600)")
            sessions.end("copied")
            await until(lambda: not alive(int(copied.output)))
            self.assertEqual((await sessions.run("a", "x = 2\nx")).output, "2")
            self.assertIn("MemoryError", (await sessions.run("a", "'a' * (1 << 30)")).output)
            first = process_folder(sessions._live["a"].pidfd)
            self.assertIn("stopped after", (await sessions.run("a", "while True: pass")).output)
            await until(lambda: not first.exists())
            self.assertEqual((await sessions.run("a", "1")).output, f"{NEW_SESSION}1")
            second = process_folder(sessions._live["a"].pidfd)
        await until(lambda: not second.exists())

    async def test_the_worker_that_plays_the_rollouts_warns_of_it_once(self) -> None:
        tool = PythonToolset(PythonConfig(limits=Limits(memory_bytes=256 * MIB, isolate=False)))
        async with tool._exit_stack:
            await tool.setup()
            self.assertEqual(await tool.python("1"), "1")
            with self.assertLogs("math_python.server", "WARNING") as logged:
                for _ in range(2):
                    await close(tool.state)
        (record,) = logged.records
        self.assertIn("no namespaces here", record.getMessage())


def children(parent: int) -> list[int]:
    """The nurseries that a process started."""
    found = Path("/proc").glob("[0-9]*/status")
    ours = [int(file.parent.name) for file in found if f"\nPPid:\t{parent}\n" in told(file)]
    return [pid for pid in ours if "nursery.py" in told(Path(f"/proc/{pid}/cmdline"))]


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    state = told(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def told(file: Path) -> str:
    """What the kernel tells, or nothing where the process has ended meanwhile."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


def process_folder(pidfd: int) -> Path:
    """Where the kernel tells about the process behind a handle."""
    about = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return Path("/proc", about.split("Pid:")[1].split()[0])


def running(mark: str) -> bool:
    """Whether a process is called so."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(mark.encode()):
                return True
    return False


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it does, for at most half a minute."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - nothing tells of a process that ends elsewhere
            await asyncio.sleep(0.05)
