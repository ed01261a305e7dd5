"""The engine, the rewards and the words of wordle."""

from __future__ import annotations

import random
import re
import tomllib
import unittest
from functools import partial
from itertools import islice
from pathlib import Path

import episodes_by_hand
from episodes_by_hand import scored
from wordle import guess_of
from wordle.demonstrations import ARGS, MAX_TOKENS, WORDS, demonstrations
from wordle.engine import Game, colours, words

taskset = partial(episodes_by_hand.taskset, "wordle")


class Engine(unittest.TestCase):
    def test_colours(self) -> None:
        for guess, secret, expected in (
            ("crane", "crane", "GGGGG"),
            ("crane", "moist", "XXXXX"),
            ("allow", "loyal", "YYYYX"),
            ("geese", "eagle", "YYXXG"),
            ("sissy", "swiss", "GYYGX"),
            ("hello", "label", "XYYYX"),
            ("speed", "abide", "XXYXY"),
        ):
            self.assertEqual(colours(guess, secret), expected, (guess, secret))

    def test_colours_are_counted_letters(self) -> None:
        rng = random.Random(3)
        for _ in range(2000):
            guess, secret = ("".join(rng.choices("abc", k=5)) for _ in range(2))
            shown = colours(guess, secret)
            self.assertEqual([c == "G" for c in shown], [a == b for a, b in zip(guess, secret, strict=True)])
            for letter in "abc":
                coloured = sum(c != "X" for c, own in zip(shown, guess, strict=True) if own == letter)
                self.assertEqual(coloured, min(guess.count(letter), secret.count(letter)))

    def test_a_game(self) -> None:
        game = Game("crane", 3)
        self.assertEqual(game.guess("[Crown]"), "C R O W N\nG G X X Y\n\nYou have 2 guesses left.")
        self.assertIn("5 letters", game.guess("cran"))
        self.assertFalse(game.over)
        self.assertAlmostEqual(game.nearness(), 0.5)
        self.assertIn("The word was crane", game.guess("zzzzz"))
        self.assertTrue(game.over and not game.won)

    def test_words(self) -> None:
        self.assertGreater(len(words()), 900)
        self.assertEqual(words(), sorted(set(words())))
        self.assertTrue(all(re.fullmatch("[a-z]{5}", word) for word in words()))


class Rewards(unittest.TestCase):
    def test_the_oracle_earns_everything(self) -> None:
        for task in taskset(num_train_examples=20):
            trace = scored(task, [f"<guess>[{task.data.answer}]</guess>"])
            self.assertAlmostEqual(trace.reward, 2.2)
            later = scored(task, ["<guess>zzzzz</guess>", f"I see. <guess>{task.data.answer}</guess>"])
            self.assertAlmostEqual(later.reward, 1.7)
            self.assertEqual(later.metrics["guesses"], 2)

    def test_wrong_guesses_earn_their_colours(self) -> None:
        task = next(iter(taskset())).with_data(answer="crane")
        self.assertAlmostEqual(scored(task, ["<guess>crown</guess>"]).reward, 0.5 + 0.2)
        self.assertAlmostEqual(scored(task, ["<guess>moist</guess>"]).reward, 0.2)
        self.assertEqual(scored(task, ["crane"]).reward, 0.0)
        self.assertEqual(scored(task, []).reward, 0.0)
        both = ["<guess>slate</guess><guess>crane</guess>"]
        self.assertAlmostEqual(scored(task, both).reward, 2.0, msg="two pairs cost the format")

    def test_guesses_after_the_last_do_not_count(self) -> None:
        task = next(iter(taskset(max_guesses=2))).with_data(answer="crane")
        replies = [f"<guess>{word}</guess>" for word in ("moist", "moist", "crane")]
        self.assertEqual(scored(task, replies).rewards["correct_answer"].score, 0.0)

    def test_thinking_is_not_guessing(self) -> None:
        self.assertEqual(guess_of("<think><guess>moist</guess></think> <guess>[crane]</guess>"), "[crane]")
        self.assertEqual(guess_of("<guess>"), "")
        self.assertEqual(guess_of("<think>Or <guess>moist</guess>?"), "", "a limit cut it while it thought")
        self.assertEqual(guess_of("<guess>crane</guess> <think>Or <guess>moist</guess>?"), "crane")


class Data(unittest.TestCase):
    def test_splits(self) -> None:
        train, held_out = taskset().secrets(), taskset(split="eval").secrets()
        self.assertEqual((len(train), len(held_out)), (2000, 20))
        self.assertFalse(set(train) & set(held_out))
        self.assertEqual(train, taskset().secrets())
        self.assertNotEqual(train, taskset(seed=1).secrets())
        self.assertEqual(len(set(taskset(num_words=20).secrets())), 18)
        with self.assertRaisesRegex(ValueError, "more than the"):
            taskset(num_words=10**6)


class Demonstrations(unittest.TestCase):
    def test_the_run_is_of_what_the_demonstrations_are_of(self) -> None:
        run = tomllib.loads(Path(__file__).parents[3].joinpath("configs/wordle.toml").read_text())
        self.assertEqual(run["env"], [{"id": "wordle", "args": ARGS}])
        self.assertEqual(run["sampling"]["max_tokens"], MAX_TOKENS)

    def rewards(self, habit_share: float) -> list[float]:
        """Of 300 demonstrated games, whose every answer must be the environment's own."""
        rewards = []
        for conversation in islice(demonstrations(3, habit_share), 300):
            told = [str(message["content"]) for message in conversation[::2]]
            guesses = [str(message["content"]) for message in conversation[1::2]]
            task = self.game(told, guesses)
            rewards.append(scored(task, guesses).reward)
        return rewards

    def game(self, told: list[str], guesses: list[str]) -> object:
        """The task that answers these guesses so."""
        template = next(iter(taskset(**ARGS)))
        self.assertEqual(told[0], template.data.prompt)
        for secret in WORDS:
            game = template.with_data(answer=secret).game()
            if [game.guess(guess_of(guess)) for guess in guesses][:-1] == told[1:] and game.over:
                return template.with_data(answer=secret)
        raise AssertionError(f"no secret answers {guesses} with {told}")

    def test_clean_ones_win_and_bad_habits_seldom(self) -> None:
        clean = self.rewards(0.0)
        self.assertGreater(min(clean), 1.4, "won in at most four guesses")
        self.assertGreater(sum(clean) / len(clean), 1.55)
        spoiled = self.rewards(1.0)
        self.assertLess(sum(spoiled) / len(spoiled), 0.9)
