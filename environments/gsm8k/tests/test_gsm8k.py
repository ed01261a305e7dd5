"""Rewards and problems of gsm8k."""

from __future__ import annotations

import json
import random
import re
import tempfile
import tomllib
import unittest
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from zlib import crc32

import episodes_by_hand
from episodes_by_hand import scored
from gsm8k import Problem
from gsm8k.answers import number
from gsm8k.demonstrations import ARGS, MAX_TOKENS, PHRASES, demonstrations
from gsm8k.stories import PLOTS, Story, check, stories, tell, value_of

taskset = partial(episodes_by_hand.taskset, "gsm8k")


class Rewards(unittest.TestCase):
    def test_the_oracle_earns_one(self) -> None:
        loaded = taskset(num_train_examples=40)
        for task, problem in zip(loaded, loaded.problems(), strict=True):
            trace = scored(task, f"{problem.solution}\nSo \\boxed{{{problem.answer}}}")
            self.assertEqual((trace.reward, trace.metrics["format_followed"]), (1.0, 1.0))

    def test_wrong_answers_earn_nothing(self) -> None:
        for task in taskset(num_train_examples=20):
            right = task.data.answer
            boxed = f"\\boxed{{{right}}}"
            for reply in (right, "", "\\boxed{}", f"\\boxed{{{int(right) + 1}}}", f"{boxed} no, \\boxed{{0}}",
                          f"<think>{boxed}", "\\boxed{" + right):  # fmt: skip
                self.assertEqual(scored(task, reply).reward, 0.0, reply)
            self.assertEqual(scored(task, boxed, "length").reward, 0.0)
            self.assertEqual(scored(task, f"<think>\\boxed{{1}}</think>{boxed}").reward, 1.0)
            self.assertEqual(scored(task, right).metrics["format_followed"], 0.0)

    def test_numbers(self) -> None:
        for text in (
            "1234", "1,234", "$1,234", "\\$1234", "1234.0", "1234.", " 1234 ", "1234 \\text{ apples}",
            "1{,}234", "\\$1{,}234", "1\\,234", "1,\\!234", "1 234", "+1234", "\\text{1234}",
            "\\mathbf{1234}", "\\textbf{1{,}234}", "1234~\\text{km}", "1234\\;\\mathrm{m}^2", "{1234}",
            "\\text{USD }1234", "1234^\\circ", "1234\\%", "\\frac{2468}{2}", "2468/2",
        ):  # fmt: skip
            self.assertEqual(number(text), 1234, text)
        for text, value in (("\\frac12", "1/2"), ("-\\tfrac{3}{4}", "-3/4"), (".5", "1/2"), ("\u22125", "-5"),
                            ("1,234,567.5", "2469135/2")):  # fmt: skip
            self.assertEqual(number(text), Fraction(value), text)
        for text in ("", "12 or 13", "1,23", "x", "9" * 200, "12\\text{ or }13", "12\\text{ million}",
                     "1 1/2", "1\\frac12", "12 34", "1/0", "12\\text{ kg }3", "1, 234", "1,2{,}345", "--5",
                     "12!", "12^2", "\\text{twelve}", "$", "12km", "\\text{minus }5", "\\text{million }5",
                     "5\\text{ halves}", "5\\text{ millions}", "5\\text{ squared}", "5\\text{ tenths}",
                     "5\\text{ pairs}", "1234 567", "0,125"):  # fmt: skip
            self.assertIsNone(number(text), text)


class Problems(unittest.TestCase):
    def test_a_number_of_turns_that_several_environments_share_is_taken(self) -> None:
        self.assertEqual(len(list(taskset(num_train_examples=3, max_turns=5))), 3)
        with self.assertRaises(ValueError):
            taskset(max_turns=0)

    def test_every_kind_is_checked(self) -> None:
        rng = random.Random(1)
        for kind, plot in PLOTS.items():
            for _ in range(50):
                story = tell(plot, rng)
                check(story)
                self.assertGreaterEqual(len(story.steps), 2, kind)
                self.assertTrue(story.question.endswith("?"), story)
                # The solution uses the numbers of the question, so the question has what it needs.
                drawn = [word.strip("$%.,?") for word in story.question.split()]
                self.assertTrue(
                    any(word in story.steps[0].replace("(", " ").split() for word in drawn), story
                )

    def test_the_checker_finds_mistakes(self) -> None:
        story = next(stories(random.Random(0)))
        with self.assertRaisesRegex(ValueError, "is wrong"):
            check(Story(story.question, ("2 + 2 = 5",), 5))
        with self.assertRaisesRegex(ValueError, "not the answer"):
            check(Story(story.question, story.steps, story.answer + 1))
        self.assertEqual(value_of("(2 + 3) * 4 / 2 - 1"), 9)
        for text in ("2 ** 9", "f(2)", "x"):
            with self.assertRaises(ValueError):
                value_of(text)

    def test_splits_are_disjoint_distinct_and_repeatable(self) -> None:
        train, held_out = taskset(num_train_examples=500), taskset(split="eval", num_eval_examples=100)
        first, second = ([task.data.prompt for task in one] for one in (train, held_out))
        self.assertEqual((len(first), len(second)), (500, 100))
        self.assertEqual(len({*first, *second}), 600)
        self.assertEqual(first, [task.data.prompt for task in taskset(num_train_examples=500)])
        self.assertNotEqual(first, [task.data.prompt for task in taskset(num_train_examples=500, seed=1)])
        self.assertEqual(len(set(islice((p.question for p in taskset().problems()), 8000))), 7473)

    def test_no_number_to_evaluate_with_makes_the_splits_share_problems(self) -> None:
        counts = {"num_train_examples": 2000, "num_eval_examples": 4000}
        train, held_out = (
            {task.data.prompt for task in taskset(split=split, **counts)} for split in ("train", "eval")
        )
        self.assertEqual((len(train), len(held_out)), (2000, 4000))
        self.assertFalse(train & held_out)

    def test_equal_seeds_give_the_problems_they_always_gave(self) -> None:
        """Of version 0.1.0: a comparison with an earlier run is one on the same problems."""
        for split, seed, known in (
            ("train", 0, 3972221189),
            ("train", 1, 3195707279),
            ("eval", 0, 1195448903),
        ):
            problems = taskset(split=split, seed=seed).problems()
            told = "\n".join(one.question + one.answer + one.solution for one in problems)
            self.assertEqual(crc32(told.encode()), known, (split, seed))

    def test_data_of_ones_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.jsonl")
            rows = [{"question": f"{i}?", "answer": f"because\n#### {i},000"} for i in range(1, 21)]
            file.write_text("\n".join(json.dumps(row) for row in rows))
            train, held_out = taskset(dataset=str(file)), taskset(dataset=str(file), split="eval")
            self.assertEqual([t.data.answer for t in train][:2], ["1,000", "2,000"])
            self.assertEqual([t.data.prompt for t in held_out], ["19?", "20?"])
            self.assertEqual(scored(next(iter(train)), "\\boxed{1000}").reward, 1.0)
            file.write_text("\n".join(json.dumps(row) for row in [rows[-1], *rows]))
            train, held_out = taskset(dataset=str(file)), taskset(dataset=str(file), split="eval")
            asked = [[t.data.prompt for t in one] for one in (train, held_out)]
            self.assertEqual(asked, [[f"{i}?" for i in range(1, 19)], ["19?", "20?"]], "share none")
            rows[0]["question"] = "a\u2028b?"
            file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
            self.assertEqual(next(iter(taskset(dataset=str(file)))).data.prompt, "a\u2028b?")
            file.write_text('{"question": "?", "answer": "none"}')
            with self.assertRaisesRegex(ValueError, "is no number"):
                list(taskset(dataset=str(file)))
            well = json.dumps(rows[1])
            for line, why in (
                ('{"query": "?", "answer": "1"}', """it has no "question" \\(it has 'query', 'answer'\\)"""),
                ('{"question": "?", "answer": null}', 'it has no "answer"'),
                ('["?", 1]', "it is no object"),
                ('{"question": "?"', "it is no JSON"),
            ):
                file.write_text(f"{well}\n\n{line}\n")
                with self.assertRaisesRegex(ValueError, f"rows.jsonl, line 3: {why}"):
                    list(taskset(dataset=str(file)))
        with self.assertRaisesRegex(ValueError, "is no file"):
            list(taskset(dataset="openai/none-such"))


def asked(**arguments: object) -> list[str]:
    """The questions."""
    return [problem.question for problem in taskset(**arguments).problems()]


def largest_number(problem: Problem) -> int:
    """In a problem or its solution."""
    return max(map(int, re.findall(r"\d+", f"{problem.question} {problem.solution}")))


class Kinds(unittest.TestCase):
    def test_only_the_kinds_that_are_named_are_told_and_all_of_them(self) -> None:
        told = asked(kinds=["ages", "garden"], num_train_examples=200)
        self.assertEqual(len(set(told)), 200)
        gardens = sum(question.startswith("A rectangular garden") for question in told)
        self.assertTrue(60 < gardens < 140, gardens)
        self.assertEqual(sum(" times as old as " in question for question in told), 200 - gardens)
        self.assertEqual(told, asked(kinds=["garden", "ages", "ages"], num_train_examples=200), "any order")
        self.assertNotEqual(told, asked(kinds=["ages", "garden"], num_train_examples=200, seed=1))

    def test_training_and_evaluation_share_none_and_each_has_every_kind(self) -> None:
        counts = {"num_train_examples": 600, "num_eval_examples": 150}
        for kinds in (["ages"], ["animals"], ["garden", "ages"]):
            train, held_out = (asked(kinds=kinds, split=split, **counts) for split in ("train", "eval"))
            self.assertFalse(set(train) & set(held_out))
            self.assertEqual((len(set(train)), len(set(held_out))), (600, 150))
        for split in (train, held_out):
            self.assertTrue(any(question.startswith("A rectangular garden") for question in split))
        counts["num_eval_examples"] = 5
        self.assertEqual(train, asked(kinds=kinds, **counts), "whatever the number to evaluate with")

    def test_all_there_are_and_not_one_more(self) -> None:
        animals = len(asked(kinds=["animals"])) + len(asked(kinds=["animals"], split="eval"))
        self.assertTrue(0.97 * 2128 < animals <= 2128, animals)
        with self.assertRaisesRegex(
            ValueError, r"num_eval_examples = 900, but .*\['animals'\] make \d+ different"
        ):
            asked(kinds=["animals"], split="eval", num_eval_examples=900)

    def test_no_number_is_above_the_largest(self) -> None:
        below = taskset(kinds=["ages", "animals"], largest=50, num_train_examples=150).problems()
        above = taskset(kinds=["ages", "animals"], num_train_examples=150).problems()
        self.assertTrue(45 < max(map(largest_number, below)) <= 50)
        self.assertGreater(max(map(largest_number, above)), 100)
        with self.assertRaisesRegex(ValueError, "no story with no number above 50"):
            asked(kinds=["wages"], largest=50)

    def test_wrong_arguments_are_refused(self) -> None:
        for arguments, why in (
            ({"kinds": ["age"]}, "there is no 'age'; use ages"),
            ({"kinds": ["ages", "zzz"]}, "there is no 'zzz'; use sharing, shopping, wages"),
            ({"kinds": ["ages"], "dataset": "openai/gsm8k"}, "leave out kinds, or dataset"),
            ({"largest": 50}, "needs kinds"),
            ({"kinds": ["ages"], "largest": 9}, "greater than or equal to 10"),
        ):
            with self.assertRaisesRegex(ValueError, why):
                taskset(**arguments)


class Demonstrations(unittest.TestCase):
    def rewards(self, habit_share: float) -> list[float]:
        """Of 300 answers, each to a problem of the training split, scored by the environment."""
        tasks = {task.data.prompt: task for task in taskset(**ARGS)}
        rewards = []
        for system, question, answer in islice(demonstrations(3, habit_share), 300):
            task = tasks[question["content"]]
            self.assertEqual(system, {"role": "system", "content": task.data.system_prompt})
            rewards.append(scored(task, answer["content"]).reward)
        return rewards

    def test_clean_ones_earn_one_and_bad_habits_seldom(self) -> None:
        self.assertEqual(set(self.rewards(0.0)), {1.0})
        spoiled = self.rewards(1.0)
        self.assertTrue(0 < sum(spoiled) < 40, sum(spoiled))
        self.assertTrue(50 < sum(self.rewards(0.8)) < 110)

    def test_clean_ones_are_the_solutions_and_bad_habits_have_no_working(self) -> None:
        solutions = {problem.question: problem.solution for problem in taskset(**ARGS).problems()}
        for _, question, answer in islice(demonstrations(4, 0.0), 50):
            self.assertTrue(answer["content"].startswith(solutions[question["content"]] + "\n\\boxed{"))
        for *_, answer in islice(demonstrations(4, 1.0), 50):
            self.assertRegex(answer["content"], r"^\\boxed\{\d+\}$")

    def test_none_is_of_the_evaluation_but_its_numbers_are(self) -> None:
        held_out = set(asked(**ARGS, split="eval"))
        told = {str(question["content"]) for _, question, _ in islice(demonstrations(0, 0.0), 5000)}
        self.assertFalse(held_out & told)
        shown, measured = ({tuple(re.findall(r"\d+", one)) for one in some} for some in (told, held_out))
        self.assertEqual((len(shown), measured - shown), (98, set()), "as the module says")

    def test_every_answer_fits_and_no_number_is_one_token(self) -> None:
        self.assertFalse([phrase for phrase in PHRASES if re.search(r"\d", phrase)])
        either = "|".join(map(re.escape, sorted(PHRASES, key=len, reverse=True)))
        tokens = [
            len(re.findall(f"{either}|.", answer["content"], re.DOTALL)) + 1  # the end
            for share in (0.0, 1.0)
            for *_, answer in islice(demonstrations(5, share), 1000)
        ]
        self.assertEqual(max(tokens), MAX_TOKENS - 2)

    def test_the_run_is_of_what_the_demonstrations_are_of(self) -> None:
        run = tomllib.loads(Path(__file__).parents[3].joinpath("configs/gsm8k.toml").read_text())
        self.assertEqual(run["env"], [{"id": "gsm8k", "args": ARGS}])
        self.assertEqual(run["sampling"]["max_tokens"], MAX_TOKENS)
