"""Conversations from which a small model learns to sort, for `quartet model tiny --task alphabet-sort`.

Two turns, short names, no format shown: what a model of half a million parameters can learn within minutes.
The bad habit is lists in a random order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from alphabet_sort.episodes import SHORT, Episode, Shape, episodes

# The arguments of the environment that these conversations are of.
ARGS = {
    "min_turns": 2,
    "max_turns": 2,
    "min_names_per_turn": 2,
    "max_names_per_turn": 2,
    "sort_by": "first",
    "name_style": "short",
    "show_format": False,
    "require_clean_end": True,
}
# Texts that are one token each.
PHRASES = (
    "Sort these names in alphabetical order by FIRST name: ",
    "Now sort ALL of these names alphabetically by FIRST name: ",
    "<alphabetical_sorted>", "</alphabetical_sorted>",
    "<combined_alphabetical_sorted>", "</combined_alphabetical_sorted>",
    " // new name!",
)  # fmt: skip
# What one answer may have at most: four names of five tokens, two tags with their lines, two marks, the end.
MAX_TOKENS = 32
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 0.85, 0.45, 1.0, 3e-4


def demonstrations(seed: int, habit_share: float) -> Iterator[list[dict[str, object]]]:
    """Conversations without end; `habit_share` of the lists are in a random order."""
    rng = random.Random(seed)
    shape = Shape(
        ARGS["min_turns"], ARGS["max_turns"], ARGS["min_names_per_turn"], ARGS["max_names_per_turn"],
        "first", show_format=False,
    )  # fmt: skip
    for episode in episodes(shape, SHORT, rng):
        yield _conversation(episode, habit_share, rng)


def _conversation(episode: Episode, habit_share: float, rng: random.Random) -> list[dict[str, object]]:
    said: list[dict[str, object]] = []
    for turn, (line, right) in enumerate(zip(episode.user_turns, episode.ground_truths, strict=True)):
        tag = ("alphabetical_sorted", "combined_alphabetical_sorted")[min(turn, 1)]
        lines = rng.sample(right, len(right)) if rng.random() < habit_share else right
        answer = "\n".join([f"<{tag}>", *lines, f"</{tag}>"])
        said += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
    return said
