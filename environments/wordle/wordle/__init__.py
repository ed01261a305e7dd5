"""wordle: guess a five-letter word in at most six turns, from the colours of earlier guesses.

1. The guess of a turn stands in <guess>...</guess>, with square brackets or without; the last pair of a turn
   counts. A turn without a guess, or with one that is no word of five letters, costs a turn.
2. Rewards: `correct_answer` 1 for the word; `length_bonus` 1 / guesses for the word; `partial_answer` 0.2 for
   each green and 0.1 for each yellow letter of the last guess where the word was not found; 0.2 times
   `format_reward`, the share of the turns with exactly one pair of tags.
3. Secrets are drawn from a list of common words; training and evaluation share none. Nothing is downloaded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from wordle.engine import LETTERS, Game, words

SYSTEM_PROMPT = (
    "You are a competitive game player. Make sure you read the game instructions carefully, and always "
    "follow the required format.\n\nIn each turn, think step-by-step, then give your guess inside "
    "<guess>...</guess> tags."
)
RULES = (
    "You are playing Wordle. A secret {letters}-letter word has been chosen. You have {guesses} attempts to "
    "guess it.\nFor each guess, wrap your word in square brackets (e.g., <guess>[apple]</guess>).\n"
    "Feedback for each letter will be given as follows:\n"
    "  - G (green): correct letter in the correct position\n"
    "  - Y (yellow): letter exists in the word but in the wrong position\n"
    "  - X (wrong): letter is not in the word\nEnter your guess to begin."
)
_GUESS = re.compile(r"<guess>(.*?)</guess>", re.DOTALL)
_TAG = re.compile(r"</?guess>")


class WordleData(vf.TaskData):
    """One game."""

    answer: str
    max_guesses: int


class WordleTask(vf.Task[WordleData]):
    """Judges a game by replaying its guesses."""

    def game(self) -> Game:
        """The game before its first guess."""
        return Game(self.data.answer, self.data.max_guesses)

    @vf.reward(weight=1.0)
    async def correct_answer(self, trace: vf.Trace) -> float:
        """Whether the word was found."""
        return float(self._played(trace).won)

    @vf.reward(weight=1.0)
    async def partial_answer(self, trace: vf.Trace) -> float:
        """Colours of the last guess, where the word was not found."""
        game = self._played(trace)
        return 0.0 if game.won else game.nearness()

    @vf.reward(weight=1.0)
    async def length_bonus(self, trace: vf.Trace) -> float:
        """More for fewer guesses."""
        game = self._played(trace)
        return 1.0 / len(game.guesses) if game.won else 0.0

    @vf.reward(weight=0.2)
    async def format_reward(self, trace: vf.Trace) -> float:
        """Share of the turns that have one guess in its tags."""
        replies = _replies(trace)
        clean = [_TAG.findall(reply) == ["<guess>", "</guess>"] for reply in replies]
        return sum(clean) / len(clean) if clean else 0.0

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Turns that were used."""
        return float(len(self._played(trace).guesses))

    def _played(self, trace: vf.Trace) -> Game:
        game = self.game()
        for reply in _replies(trace):
            if not game.over:
                game.guess(guess_of(reply))
        return game


def _replies(trace: vf.Trace) -> list[str]:
    contents = [message.content for message in trace.assistant_messages]
    return [content if isinstance(content, str) else "" for content in contents]


def guess_of(reply: str) -> str:
    """What stands in the last pair of tags, outside of any thinking; empty where none does."""
    found = _GUESS.findall(reply.rpartition("</think>")[2].partition("<think>")[0])
    return str(found[-1]) if found else ""


class WordleConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    split: Literal["train", "eval"] = "train"
    num_train_examples: int = Field(default=2000, ge=1, le=1_000_000)
    num_eval_examples: int = Field(default=20, ge=0, le=10_000)
    seed: int = 0
    max_guesses: int = Field(default=6, ge=1, le=50)
    num_words: int | None = Field(default=None, ge=2)
    """Secrets come from so many words alone, for small models; all by default."""
    show_rules: bool = True
    """Whether the game begins with its rules."""

    @model_validator(mode="after")
    def _enough_words(self) -> Self:
        total = len(words())
        if self.num_words is not None and self.num_words > total:
            raise ValueError(f"num_words = {self.num_words} is more than the {total} words there are")
        return self


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    """Secrets to find."""

    def load(self) -> Iterator[WordleTask]:
        """The games of the configured split."""
        config = self.config
        rules = RULES.format(letters=LETTERS, guesses=config.max_guesses)
        for secret in self.secrets():
            data = WordleData(
                prompt=rules if config.show_rules else "Guess the word.",
                system_prompt=SYSTEM_PROMPT if config.show_rules else None,
                answer=secret,
                max_guesses=config.max_guesses,
            )
            yield WordleTask(data, config.task)

    def secrets(self) -> list[str]:
        """The secrets of the split: a fixed tenth of the words is held out for evaluation."""
        config, drawn = self.config, self.drawn()
        held_out = max(1, len(drawn) // 10)
        own = drawn[:held_out] if config.split == "eval" else drawn[held_out:]
        count = config.num_eval_examples if config.split == "eval" else config.num_train_examples
        # More games than words: the same secrets again, in the same order.
        return [own[at % len(own)] for at in range(count)]

    def drawn(self) -> list[str]:
        """All words that secrets come from, of both splits."""
        drawn = words()
        random.Random(f"{self.config.seed}:words").shuffle(drawn)
        return drawn[: self.config.num_words]


class WordleEnv(vf.SingleAgentEnv):
    """Answers each guess until the game is over."""

    async def run(self, task: vf.Task, agents: Any) -> None:
        """Play one game."""
        game = task.game()
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated:
                told = game.guess(guess_of(segment.last_reply))
                if game.over:
                    break
                segment = await talk.turn(told)


__all__ = ["WordleEnv", "WordleTaskset"]
