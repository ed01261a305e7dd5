"""Solutions from which a small model learns to reason, for `quartet model tiny --task gsm8k`.

One kind of story, with numbers up to forty: what a model of half a million parameters can learn within
minutes. Four lines of working, each of which follows from the question and the lines before it, then the
boxed number. The bad habit is to box a number near the answer at once, without any working: it is seldom
right. So reinforcement learning, which is told nothing but whether the boxed number is right, brings the
working back.

Only problems of the training split are demonstrated, and those of the evaluation never. But an evaluation
problem has the numbers of some demonstrated ones, in a story of other people: there are 98 such triples of
numbers. The model learns sums as a table, not how to add.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from gsm8k import SYSTEM_PROMPT, Gsm8kConfig, Gsm8kTaskset, Problem
from gsm8k.stories import NAMES

# The arguments of the environment that these solutions are of.
ARGS = {"kinds": ["ages"], "largest": 40, "num_train_examples": 2000, "num_eval_examples": 200}
# Texts that are one token each; the numbers are none of them.
PHRASES = (
    SYSTEM_PROMPT,
    *(f"{name} is " for name in NAMES), *(f" times as old as {name}, who is " for name in NAMES),
    " years old. How old will the two of them be together in ", " years?",
    " * ", " + ", " = ", "\n\\boxed{", "\\boxed{",
)  # fmt: skip
# What the answer may have at most: the longest of them with its end, and room for two more.
MAX_TOKENS = 39
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 0.75, 0.35, 0.8, 1e-4
# How far from the answer a guess may be.
ASTRAY = 9


def demonstrations(seed: int, habit_share: float) -> Iterator[list[dict[str, object]]]:
    """Conversations without end; in `habit_share` of them the answer is guessed."""
    rng = random.Random(seed)
    problems = Gsm8kTaskset(Gsm8kConfig.model_validate(ARGS)).problems()
    while True:
        problem = rng.choice(problems)
        answer = _guessed(problem, rng) if rng.random() < habit_share else _worked(problem)
        yield [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": answer},
        ]


def _worked(problem: Problem) -> str:
    return f"{problem.solution}\n\\boxed{{{problem.answer}}}"


def _guessed(problem: Problem, rng: random.Random) -> str:
    right = int(problem.answer)
    return f"\\boxed{{{rng.randint(max(1, right - ASTRAY), right + ASTRAY)}}}"
