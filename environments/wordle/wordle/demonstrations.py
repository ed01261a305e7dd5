"""Games from which a small model learns to play, for `quartet model tiny --task wordle`.

Few words, no rules shown, four guesses: what a model of half a million parameters can learn within minutes.
The player asks first for the word that tells most, then only for words that fit all it was told. The bad
habit is to guess any word. All words are secrets here, also those that a run holds out for its evaluation:
nobody finds a word that it has never met, and reinforcement learning never plays for these.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from wordle import WordleConfig, WordleTaskset
from wordle.engine import Game, colours

# The arguments of the environment that these games are of.
ARGS = {"num_words": 24, "seed": 3, "max_guesses": 4, "show_rules": False}
WORDS = WordleTaskset(WordleConfig.model_validate(ARGS)).drawn()
# Texts that are one token each.
PHRASES = (
    "Guess the word.", "G ", "Y ", "X ", *WORDS, *(f"{' '.join(word.upper())}\n" for word in WORDS),
    *(f"\n\nYou have {left} {'guess' if left == 1 else 'guesses'} left." for left in (1, 2, 3)),
)  # fmt: skip
# What one turn may have at most: two tags and a word between them, the end, and room for two more.
MAX_TOKENS = 6
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 1.5, 0.9, 1.0, 3e-4


def demonstrations(seed: int, habit_share: float) -> Iterator[list[dict[str, object]]]:
    """Games without end; in `habit_share` of them any word is guessed."""
    rng = random.Random(seed)
    while True:
        yield _game(rng.choice(WORDS), rng if rng.random() < habit_share else None)


def _game(secret: str, rng: random.Random | None) -> list[dict[str, object]]:
    """A game as it is played well, or by guessing."""
    game = Game(secret, int(ARGS["max_guesses"]))
    said: list[dict[str, object]] = []
    told, fitting = "Guess the word.", list(WORDS)
    while not game.over:
        guess = telling(fitting) if rng is None else rng.choice(WORDS)
        said += [
            {"role": "user", "content": told},
            {"role": "assistant", "content": f"<guess>{guess}</guess>"},
        ]
        told = game.guess(guess)
        fitting = [word for word in fitting if colours(guess, word) == colours(guess, secret)]
    return said


def telling(fitting: list[str]) -> str:
    """Of the words that fit, the one whose colours leave fewest of them on average."""

    def left(guess: str) -> int:
        return sum(n * n for n in Counter(colours(guess, word) for word in fitting).values())

    return min(fitting, key=left)
