"""The tool, the rewards and the problems of math-python."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
import tomllib
import unittest
import unittest.mock
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import episodes_by_hand
import math_python
import verifiers.v1 as vf
from math_python.answers import same_answer
from math_python.demonstrations import ARGS, MAX_TOKENS, demonstrations
from math_python.server import PythonState, close
from math_python.sessions import NEW_SESSION, Limits, Sessions

MIB = 1 << 20


taskset = partial(episodes_by_hand.taskset, "math-python")


def tasks(**arguments: object) -> list[vf.Task]:
    return list(taskset(**{"num_train": 60, "num_eval": 10, **arguments}))


def reward(task: vf.Task, reply: str, finish: str = "stop") -> float:
    """What a one-turn rollout with this reply earns."""
    return episodes_by_hand.scored(task, reply, finish, state=PythonState()).reward


class Rewards(unittest.TestCase):
    def test_the_right_answer_earns_one_and_others_nothing(self) -> None:
        for task in tasks():
            right = task.data.answer
            self.assertEqual(reward(task, f"So it is $\\boxed{{{right}}}$."), 1.0)
            self.assertEqual(reward(task, f"\\boxed{{0}}, no: \\boxed{{ {right} }}"), 1.0)
            for wrong in (
                right,
                "",
                f"\\boxed{{{right}1}}",
                f"\\boxed{{{right}}} or \\boxed{{no}}",
                "\\boxed{}",
            ):
                self.assertEqual(reward(task, wrong), 0.0, wrong)
            self.assertEqual(reward(task, f"\\boxed{{{right}}}", "length"), 0.0)
            self.assertEqual(reward(task, f"<think>\\boxed{{{right}}}"), 0.0)

    def test_equal_answers(self) -> None:
        for given, expected in (
            ("1/2", "0.5"), ("\\frac{1}{2}", "1/2"), ("\\dfrac{-3}{4}", "-0.75"), ("1,000", "1000"),
            ("50\\%", "1/2"), ("$12$", "12"), ("12.", "12"), ("12.0", "12"), ("x^2 + 1", "x^2+1"),
            ("\\left(1, 2\\right)", "(1,2)"), ("\\$12", "12"),
            ("\\text{Tuesday}", "{Tuesday}"), ("1{,}234", "1234"), ("\\$1{,}234", "1,234"), ("+54", "54"),
            ("\\text{54}", "54"), ("\\mathbf{54}", "54"), ("54~\\text{km}", "54"),
            ("54\\text{ primes}", "54"), ("5", "5\\mathrm{ m}^{2}"), ("\\frac12", "1/2"),
            ("-\\frac{1}2", "-0.5"), ("1 234", "1234"), ("a\\;+ b", "a+b"),
            ("5\\text{ km}", "5\\,\\text{km}"), ("\\text{USD }5", "5"), ("90^{\\circ}", "90"),
        ):  # fmt: skip
            self.assertTrue(same_answer(given, expected), (given, expected))
        for given, expected in (
            ("1/2", "1/3"), ("12", "120"), ("1,00", "100"), ("1/0", "0"), ("", ""), ("x", "y"),
            ("12\\text{ or }13", "1213"), ("5\\text{ m}", "5\\text{ km}"), ("5\\text{ million}", "5"),
            ("1 1/2", "11/2"), ("1\\,1/2", "11/2"), ("2x", "2"), ("\\frac123", "1/23"), ("5^2", "5"),
            ("50\\text{ percent}", "50"), ("\\text{minus }5", "5"), ("\\text{not }5", "5"),
            ("5\\text{ halves}", "5"), ("5\\text{ millions}", "5"), ("5\\text{ squared}", "5"),
            ("1234 567", "1234567"), ("0,125", "125"),
            ("9" * 500, "9" * 500), ("2\\frac{1}{2}", "\\frac{21}{2}"),
        ):  # fmt: skip
            self.assertFalse(same_answer(given, expected), (given, expected))


class Problems(unittest.TestCase):
    def test_streams(self) -> None:
        def prompts(**arguments: object) -> list[str]:
            return [task.data.prompt for task in tasks(**arguments)]

        self.assertEqual(prompts(), prompts())
        self.assertNotEqual(prompts(), prompts(seed=1))
        self.assertFalse(set(prompts()) & set(prompts(split="eval")))
        many = prompts(num_train=1000)
        self.assertEqual(len(set(many)), 1000, "none comes twice")
        self.assertEqual(many[:60], prompts(), "and more of them begin with the same")
        self.assertIn("numpy, sympy", prompts()[0])
        small = prompts(problems="arithmetic", digits=1, num_eval=50)
        self.assertFalse(
            set(small) & set(prompts(problems="arithmetic", digits=1, num_eval=50, split="eval"))
        )
        few = prompts(problems="arithmetic", digits=1, num_train=400)
        self.assertEqual(len(few), 400)
        self.assertGreater(len(set(few)), 250, "all that there are, then again")
        with self.assertRaisesRegex(ValueError, "too few different"):
            prompts(problems="arithmetic", digits=1, num_eval=5000)

    def test_answers_agree_with_sympy(self) -> None:
        import sympy

        seen = 0
        for task in tasks(num_train=200):
            text, answer = task.data.prompt.split("\n\n")[-1], task.data.answer
            if text.startswith("How many positive divisors"):
                self.assertEqual(sympy.divisor_count(int(text.split()[-2])), int(answer))
                seen += 1
            elif text.startswith("How many prime numbers"):
                low, high = map(int, re.findall(r"\d+", text))
                self.assertEqual(sympy.primepi(high) - sympy.primepi(low - 1), int(answer))
                seen += 1
        self.assertGreater(seen, 20)

    def test_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "problems.jsonl")
            rows = [{"q": f"{i}?", "a": i, "avg": i / 10, "more": "a\u2028b"} for i in range(10)]
            file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
            own = {"dataset_name": str(file), "question_key": "q", "answer_key": "a",
                   "instruction_prompt": "",
                   "pip_install_packages": "", "num_eval": 2}  # fmt: skip
            self.assertEqual([t.data.prompt for t in tasks(**own)], [f"{i}?" for i in range(8)])
            self.assertEqual([t.data.answer for t in tasks(**own, split="eval")], ["8", "9"])
            easy = tasks(**own, difficulty_key="avg", min_avg_reward=0.2, max_avg_reward=0.6)
            self.assertEqual([t.data.answer for t in easy], ["2", "3", "4"])
            with self.assertRaisesRegex(ValueError, "row 1: it has no 'question'"):
                tasks(dataset_name=str(file))
            for line, why in (
                ("{bad", "it is no JSON"),
                ("[1]", "it is no object"),
                ('{"q": "?", "a": 1}', "it has no 'avg'; it has q, a"),
                ('{"q": "?", "a": 1, "avg": "high"}', "avg = 'high' is no number"),
            ):
                file.write_text(f"{json.dumps(rows[0])}\n{line}\n")
                with self.assertRaisesRegex(ValueError, f"problems.jsonl, row 2: {why}"):
                    tasks(**own, difficulty_key="avg")
        with self.assertRaisesRegex(ValueError, "is no file"):
            tasks(dataset_name="nowhere.jsonl")

    def test_difficulty_chooses_the_kinds(self) -> None:
        def openings(difficulty: str | None) -> set[str]:
            return {" ".join(task.data.prompt.split("\n\n")[-1].split()[:2])
                    for task in tasks(num_train=300, difficulty=difficulty)}  # fmt: skip

        easy, hard = openings("easy"), openings("hard")
        self.assertIn("How many", easy & hard)
        self.assertIn("In how", hard - easy)
        self.assertIn("Compute $\\sum_{i=1}^{4}", easy - hard)
        self.assertLessEqual({"In how", "Compute $\\sum_{i=1}^{4}"}, openings(None))
        with self.assertRaisesRegex(ValueError, "give digits"):
            taskset(problems="arithmetic", difficulty="hard")
        with self.assertRaisesRegex(ValueError, "give difficulty_key"):
            taskset(dataset_name="x", difficulty="hard")

    def test_a_split_to_evaluate_with(self) -> None:
        """A data set of the hub has several; of what has none a part is held out, whatever it is called."""
        seen = []

        def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, str]]:
            seen.append((name, subset, split))
            return [{"question": f"{split} {i}", "answer": str(i)} for i in range(9)]

        hub = {"dataset_name": "some/math", "num_train": 5, "num_eval": 3, "instruction_prompt": "",
               "pip_install_packages": ""}  # fmt: skip
        library = unittest.mock.Mock(load_dataset=load_dataset)
        with unittest.mock.patch.dict("sys.modules", datasets=library):
            train = [task.data.prompt for task in tasks(**hub, eval_split="test")]
            self.assertEqual(train, [f"train {i}" for i in range(5)])
            held_out = [task.data.prompt for task in tasks(**hub, eval_split="test", split="eval")]
            self.assertEqual(held_out, [f"test {i}" for i in range(3)])
            self.assertEqual(seen, [("some/math", None, "train"), ("some/math", None, "test")])
            last = [task.data.prompt for task in tasks(**hub, split="eval")]
            self.assertEqual(last, [f"train {i}" for i in range(6, 9)])
        plain = [task.data.prompt for task in tasks(split="eval")]
        self.assertEqual([task.data.prompt for task in tasks(eval_split="test", split="eval")], plain)
        with self.assertRaisesRegex(ValueError, "names a split of a dataset of the hub"):
            taskset(eval_split="validation")

    def test_packages_that_are_not_there_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "'no_such_package'"):
            taskset(pip_install_packages="sympy no_such_package")

    def test_demonstrations_use_the_tool_and_earn_one(self) -> None:
        (task, *_) = tasks(**ARGS)
        for conversation in islice(demonstrations(5, 0.0), 50):
            (call,) = conversation[1]["tool_calls"]
            self.assertEqual(str(eval(call["function"]["arguments"]["code"])), conversation[2]["content"])
            asked = task.with_data(prompt=conversation[0]["content"], answer=conversation[2]["content"])
            self.assertEqual(reward(asked, conversation[3]["content"]), 1.0)
        guesses = sum(len(one) == 2 for one in islice(demonstrations(5, 0.75), 400))
        self.assertTrue(250 < guesses < 350)


class Config(unittest.TestCase):
    def test_the_run_is_of_what_the_demonstrations_are_of(self) -> None:
        run = tomllib.loads(Path(__file__).parents[3].joinpath("configs/math-python.toml").read_text())
        self.assertEqual(run["env"], [{"id": "math-python", "args": ARGS}])
        self.assertEqual(run["sampling"]["max_tokens"], MAX_TOKENS)


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
        """sessions.py 5: the next has its own process, and neither process nor descriptor is left over."""
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
        self.assertTrue(256 < most < 512 - 64, most)

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
            self.assertEqual((await sessions.run("a", "x = 2\nx")).output, "2")
            self.assertIn("MemoryError", (await sessions.run("a", "'a' * (1 << 30)")).output)
            first = process_folder(sessions._live["a"].pidfd)
            self.assertIn("stopped after", (await sessions.run("a", "while True: pass")).output)
            await until(lambda: not first.exists())
            self.assertEqual((await sessions.run("a", "1")).output, f"{NEW_SESSION}1")
            second = process_folder(sessions._live["a"].pidfd)
        await until(lambda: not second.exists())


def children(parent: int) -> list[int]:
    """The nurseries that a process started."""
    found = Path("/proc").glob("[0-9]*/status")
    ours = [int(file.parent.name) for file in found if f"\nPPid:\t{parent}\n" in told(file)]
    return [pid for pid in ours if "nursery.py" in told(Path(f"/proc/{pid}/cmdline"))]


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
