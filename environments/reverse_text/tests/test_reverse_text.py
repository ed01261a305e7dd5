"""Rewards and data of reverse-text."""

from __future__ import annotations

import json
import tempfile
import unittest
from functools import partial
from pathlib import Path

import episodes_by_hand
from episodes_by_hand import scored
from reverse_text import SYSTEM_PROMPT, parse_answer

taskset = partial(episodes_by_hand.taskset, "reverse-text")


class Rewards(unittest.TestCase):
    def setUp(self) -> None:
        self.task = next(iter(taskset(texts=None, num_train=4)))
        self.answer = self.task.data.prompt[::-1]

    def reward(self, reply: str, finish: str = "stop") -> float:
        return scored(self.task, reply, finish).reward

    def test_the_right_answer_earns_one(self) -> None:
        trace = scored(self.task, f"<reversed_text>{self.answer}</reversed_text>")
        self.assertEqual(trace.reward, 1.0)
        self.assertEqual(trace.metrics["exact_match"], 1.0)
        self.assertEqual(self.reward(f"Let me see.\n<reversed_text>\n{self.answer}\n</reversed_text>\n"), 1.0)

    def test_a_near_answer_earns_its_similarity(self) -> None:
        trace = scored(self.task, f"<reversed_text>{self.answer[:-1]}</reversed_text>")
        n = len(self.answer)
        self.assertAlmostEqual(trace.reward, 2 * (n - 1) / (2 * n - 1))
        self.assertEqual(trace.metrics["exact_match"], 0.0)

    def test_a_long_answer_is_measured_as_a_short_one(self) -> None:
        for chars in (400, 1200):
            (task,) = taskset(num_train=1, num_eval=0, min_chars=chars, max_chars=chars)
            for text in (task.data.answer[:-1] + "?", "?" + task.data.answer[1:]):
                trace = scored(task, f"<reversed_text>{text}</reversed_text>")
                self.assertAlmostEqual(trace.reward, 1 - 1 / chars)

    def test_what_is_not_one_clean_pair_earns_nothing(self) -> None:
        good = f"<reversed_text>{self.answer}</reversed_text>"
        for reply in (
            self.answer,
            "",
            f"<reversed_text>{self.answer}",
            f"{good} and more",
            f"{good}</reversed_text>",
            good + good,
            "<reversed_text></reversed_text>",
            f"<reversed_text>{good}",
            f"<think>{good}",
            f"<think>{good}</think>",
        ):
            self.assertEqual(self.reward(reply), 0.0, reply)

    def test_what_is_thought_is_no_part_of_the_answer(self) -> None:
        good = f"<reversed_text>{self.answer}</reversed_text>"
        for thought in (
            "In <reversed_text> tags.",
            good,
            "<reversed_text>x</reversed_text> </reversed_text>",
        ):
            self.assertEqual(self.reward(f"<think>{thought}</think>{good}"), 1.0)
        wrong = f"<think>{good}</think><reversed_text>?</reversed_text>"
        self.assertEqual(self.reward(wrong), 0.0)
        self.assertEqual(self.reward(f"{good}</think>{good}"), 1.0, "the template opened the thinking")
        self.assertEqual(self.reward(f"{good}<think> and so on"), 0.0, "it goes on")

    def test_a_cut_answer_earns_nothing(self) -> None:
        self.assertEqual(self.reward(f"<reversed_text>{self.answer}</reversed_text>", "length"), 0.0)

    def test_junk_after_the_answer_can_be_allowed(self) -> None:
        self.task = next(iter(taskset(require_clean_end=False)))
        good = f"<reversed_text>{self.task.data.prompt[::-1]}</reversed_text>"
        self.assertEqual(self.reward(f"{good} and more"), 1.0)
        self.assertEqual(self.reward(good, "length"), 1.0)

    def test_parse_answer(self) -> None:
        self.assertEqual(parse_answer("<reversed_text> a b </reversed_text>"), "a b")
        self.assertIsNone(parse_answer("</reversed_text>a<reversed_text>"))


class Data(unittest.TestCase):
    def texts(self, **arguments: object) -> list[str]:
        return [task.data.prompt for task in taskset(**arguments)]

    def test_prompts_are_as_configured(self) -> None:
        task = next(iter(taskset()))
        self.assertEqual(task.data.system_prompt, SYSTEM_PROMPT)
        self.assertEqual(
            SYSTEM_PROMPT,
            "Reverse the text character-by-character. Put your answer in <reversed_text> tags.",
        )
        for text in self.texts(min_chars=2, max_chars=9, alphabet="xyz", num_train=300):
            self.assertTrue(2 <= len(text) <= 9 and set(text) <= set("xyz"), text)

    def test_splits_are_disjoint_distinct_and_repeatable(self) -> None:
        train, held_out = self.texts(), self.texts(split="eval")
        self.assertEqual((len(train), len(held_out)), (2000, 200))
        self.assertEqual(len(set(train) | set(held_out)), 2200)
        self.assertEqual(train, self.texts())
        self.assertEqual(held_out, self.texts(split="eval", num_train=5))
        self.assertNotEqual(train, self.texts(seed=1))

    def test_own_texts(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "texts.jsonl")
            rows = [
                {"text": "Ein\u2028Wort"}, {"prompt": "日本語"}, "plain", {"text": "plain"}, {"text": "last"},
            ]  # fmt: skip
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            file.write_text("\r\n".join(lines) + "\n", encoding="utf-8")
            self.assertEqual(self.texts(texts=file, num_eval=1), ["Ein\u2028Wort", "日本語", "plain"])
            self.assertEqual(self.texts(texts=file, num_eval=1, split="eval"), ["last"])
            self.assertEqual([t.data.answer for t in taskset(texts=file, num_eval=1)][1], "語本日")
            with self.assertRaisesRegex(ValueError, "none are left to train on"):
                self.texts(texts=file, num_eval=4)
            file.write_text('{"wort": 1}\n')
            with self.assertRaisesRegex(ValueError, "line 1"):
                self.texts(texts=file, num_eval=0)
            file.write_text('"plain"\n{wort\n')
            with self.assertRaisesRegex(ValueError, "texts.jsonl, line 2: it is no JSON"):
                self.texts(texts=file, num_eval=0)

    def test_more_texts_than_there_are_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "distinct texts are asked for"):
            taskset(alphabet="ab", min_chars=1, max_chars=3)
