"""Rewards, data and conversations of alphabet-sort, through Verifiers itself."""

from __future__ import annotations

import json
import tempfile
import tomllib
import unittest
from functools import partial
from itertools import islice
from pathlib import Path

import episodes_by_hand
import verifiers.v1 as vf
from alphabet_sort import TAGS, similarity
from alphabet_sort.demonstrations import ARGS, MAX_TOKENS, demonstrations
from alphabet_sort.episodes import sorting_key

taskset = partial(episodes_by_hand.taskset, "alphabet-sort")


def tasks(**arguments: object) -> list[vf.Task]:
    return list(taskset(num_train=50, num_eval=20, **arguments))


def oracle(task: vf.Task) -> list[str]:
    """The right answers."""
    lists = ["\n".join(right) for right in task.data.ground_truths]
    tags = [TAGS[0], *[TAGS[1]] * (len(lists) - 1)]
    return [f"<{tag}>\n{one}\n</{tag}>" for tag, one in zip(tags, lists, strict=True)]


def scored(task: vf.Task, replies: list[str], finish: str = "stop") -> vf.Trace:
    """The trace of an episode with these replies, scored by the task."""
    return episodes_by_hand.scored(task, replies, finish, lines=task.data.user_turns)


class Rewards(unittest.TestCase):
    def test_the_right_lists_earn_one(self) -> None:
        for task in tasks():
            trace = scored(task, oracle(task))
            self.assertEqual((trace.reward, trace.metrics["perfect_turns"]), (1.0, 1.0))

    def test_wrong_lists_earn_less_and_no_list_nothing(self) -> None:
        for task in tasks(min_turns=2, min_names_per_turn=3):
            right = oracle(task)
            backwards = ["\n".join(reply.split("\n")[::-1]) for reply in right]
            self.assertEqual(scored(task, backwards).reward, 0.0, "the tags are the wrong way round")
            lines = [reply.split("\n") for reply in right]
            reversed_lists = ["\n".join([one[0], *one[-2:0:-1], one[-1]]) for one in lines]
            self.assertLess(scored(task, reversed_lists).reward, 0.8)
            self.assertEqual(scored(task, ["no"] * len(right)).reward, 0.0)

    def test_turns_that_were_not_reached_count(self) -> None:
        for task in tasks(min_turns=2, max_turns=4):
            turns = len(task.data.user_turns)
            self.assertAlmostEqual(scored(task, oracle(task)[:1]).reward, 1 / turns)

    def test_power(self) -> None:
        for per_turn, power in ((True, 1), (True, 4), (False, 2)):
            (task, *_) = tasks(min_turns=2, max_turns=2, power_per_turn=per_turn, similarity_power=power)
            right = oracle(task)
            near = right[1].replace("\n", "\nx", 1)
            part = similarity(near, TAGS[1], task.data.ground_truths[1])
            self.assertTrue(0.5 < part < 1)
            expected = (1 + part**power) / 2 if per_turn else ((1 + part) / 2) ** power
            self.assertAlmostEqual(scored(task, [right[0], near]).reward, expected)

    def test_several_attempts_must_improve(self) -> None:
        right = ["Ada", "Bob", "Cleo"]
        good, bad = ("<t>\nAda\nBob\nCleo\n</t>", "<t>\nCleo\nBob\n</t>")
        self.assertEqual(similarity(f"{bad} then {good}", "t", right), 1.0)
        self.assertEqual(similarity(good + bad, "t", right), 0.0)
        self.assertEqual(similarity(good + good, "t", right), 0.0)
        self.assertEqual(similarity("<t></t>", "t", right), 0.0)

    def test_what_is_thought_is_no_attempt(self) -> None:
        for task in tasks():
            right = oracle(task)
            drafted = [f"<think>{one}\nIt is so.</think>{one}" for one in right]
            self.assertEqual(scored(task, drafted).reward, 1.0)
            for unsaid in ("<think>{}</think>", "<think>{}"):
                self.assertEqual(scored(task, [unsaid.format(one) for one in right]).reward, 0.0)

    def test_a_long_list_is_measured_as_a_short_one(self) -> None:
        (task,) = taskset(
            num_train=1, num_eval=0, min_turns=3, max_turns=3, min_names_per_turn=20, max_names_per_turn=20
        )
        right, replies = task.data.ground_truths[2], oracle(task)
        wrong = "\n".join(f"?{name[1:]}" for name in right)
        replies[2] = f"<{TAGS[1]}>\n{wrong}\n</{TAGS[1]}>"
        self.assertGreater(len(wrong), 400)
        trace = scored(task, replies)
        self.assertAlmostEqual(trace.reward, (2 + (1 - len(right) / len(wrong)) ** 4) / 3)
        self.assertAlmostEqual(trace.metrics["perfect_turns"], 2 / 3)

    def test_clean_end(self) -> None:
        for required, expected in ((True, 0.0), (False, 1.0)):
            (task, *_) = tasks(require_clean_end=required)
            for junk in ("junk", "<think> and so on"):
                self.assertEqual(scored(task, [f"{one} {junk}" for one in oracle(task)]).reward, expected)
            self.assertEqual(scored(task, oracle(task), "length").reward, expected)


class Data(unittest.TestCase):
    def test_episodes_are_as_configured_and_have_one_right_order(self) -> None:
        seen = set()
        for task in tasks(min_turns=2, max_turns=3, min_names_per_turn=2, max_names_per_turn=4):
            turns = task.data.user_turns
            seen.add(len(turns))
            by_first = "by FIRST name" in turns[0]
            self.assertIn("<alphabetical_sorted>", turns[0])
            names: list[str] = []
            for turn, right in zip(turns, task.data.ground_truths, strict=True):
                new = turn.splitlines()[0].split(": ")[1].split(", ")
                self.assertTrue(2 <= len(new) <= 4)
                names += new
                keys = [sorting_key(one.removesuffix(" // new name!"), by_first) for one in right]
                self.assertEqual(keys, sorted(set(keys)))
                marked = [one for one in right if one.endswith(" // new name!")]
                self.assertEqual(len(marked), 0 if turn is turns[0] else len(new))
                self.assertEqual({one.removesuffix(" // new name!") for one in right}, set(names))
        self.assertEqual(seen, {2, 3})

    def test_streams(self) -> None:
        def turns(**arguments: object) -> list[str]:
            return [" ".join(task.data.user_turns) for task in tasks(**arguments)]

        self.assertEqual(turns(), turns())
        self.assertNotEqual(turns(), turns(seed=1))
        self.assertFalse(set(turns()) & set(turns(split="eval")))
        self.assertEqual(len(turns(split="eval")), 20)

    def test_small_episodes_share_no_list_either(self) -> None:
        """They run out: 325 pairs of short names, of which evaluation has many."""

        def lists(**arguments: object) -> set[str]:
            return {str(task.data.ground_truths) for task in list(taskset(**small, **arguments))}

        small = {"name_style": "short", "sort_by": "first", "max_turns": 1, "min_names_per_turn": 2,
                 "max_names_per_turn": 2, "num_train": 900, "num_eval": 150}  # fmt: skip
        self.assertFalse(lists() & lists(split="eval"))
        self.assertEqual(len(list(taskset(**small))), 900)
        small |= {"min_names_per_turn": 1, "max_names_per_turn": 1, "num_eval": 1000}
        with self.assertRaisesRegex(ValueError, "num_eval = 1000 holds out every list"):
            lists()

    def test_names_of_ones_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "names.jsonl")
            people = ["Cy Abt", "Di Roe", "Em Paz", "Fay Oz"]
            rows = [{"name": "Ida Keller", "of": "a\u2028b"}, "Bo Ek", {"names": people}]
            file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
            (task, *_) = taskset(names=file, max_turns=1, min_names_per_turn=5, sort_by="last", num_eval=1)
            self.assertTrue(
                {one.strip() for one in task.data.ground_truths[0]}
                <= {"IdaKeller", "BoEk", "CyAbt", "DiRoe", "EmPaz", "FayOz"}
            )
            with self.assertRaisesRegex(ValueError, "too few different keys"):
                tasks(names=file, min_names_per_turn=9, max_names_per_turn=9)
            file.write_text('{"wort": 1}')
            with self.assertRaisesRegex(ValueError, "line 1"):
                tasks(names=file)
            file.write_text('"Ida Keller"\nBo Ek')
            with self.assertRaisesRegex(ValueError, "names.jsonl, line 2: it is no JSON"):
                tasks(names=file)

    def test_refusals(self) -> None:
        for arguments, why in (
            ({"min_turns": 4}, "min_turns = 4 is more than"),
            ({"name_style": "short"}, "no last names"),
            ({"name_style": "short", "sort_by": "first", "max_turns": 6}, "26 short ones"),
        ):
            with self.assertRaisesRegex(ValueError, why):
                taskset(**arguments)


class Config(unittest.TestCase):
    def test_the_run_is_of_what_the_demonstrations_are_of(self) -> None:
        run = tomllib.loads(Path(__file__).parents[3].joinpath("configs/alphabet-sort.toml").read_text())
        self.assertEqual(run["env"], [{"id": "alphabet-sort", "args": ARGS}])
        self.assertEqual(run["sampling"]["max_tokens"], MAX_TOKENS)


class Demonstrations(unittest.TestCase):
    def rewards(self, habit_share: float) -> list[float]:
        by_opening = {task.data.user_turns[0]: task for task in taskset(num_train=1, **ARGS)}
        (template,) = by_opening.values()
        rewards = []
        for conversation in islice(demonstrations(3, habit_share), 200):
            said = [str(message["content"]) for message in conversation]
            right = (
                [[line for line in text.splitlines()[1:-1]] for text in said[1::2]]
                if not habit_share
                else None
            )
            names = [line.split(": ")[1].split(", ") for line in said[::2]]
            both = sorted([*names[0], *[f"{name} // new name!" for name in names[1]]])
            truths = [sorted(names[0]), both]
            if right is not None:
                self.assertEqual(right, truths)
            task = template.with_data(user_turns=said[::2], ground_truths=truths)
            rewards.append(scored(task, said[1::2]).reward)
        return rewards

    def test_clean_ones_earn_one_and_bad_habits_less(self) -> None:
        self.assertEqual(set(self.rewards(0.0)), {1.0})
        spoiled = self.rewards(0.9)
        self.assertLess(sum(spoiled) / len(spoiled), 0.7)
        self.assertGreater(sum(reward < 1 for reward in spoiled), 100)
