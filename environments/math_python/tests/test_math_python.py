"""The rewards and the problems of math-python."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
import unittest
import unittest.mock
from functools import partial
from itertools import islice
from pathlib import Path

import episodes_by_hand
import verifiers.v1 as vf
from math_python.answers import same_answer
from math_python.demonstrations import ARGS, MAX_TOKENS, demonstrations
from math_python.server import PythonState

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
            file.write_text("\n".join(json.dumps(row) for row in [rows[9], *rows]), encoding="utf-8")
            self.assertEqual([t.data.prompt for t in tasks(**own)], [f"{i}?" for i in range(8)], "share none")
            for few in ([rows[0]], 4 * [rows[0]]):
                file.write_text("\n".join(json.dumps(row) for row in few), encoding="utf-8")
                for split in ("train", "eval"):
                    with self.assertRaisesRegex(ValueError, "num_eval = 2 none are left to train on"):
                        tasks(**own, split=split)
            file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
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
