"""Conversations from which a small model learns to use the tool, for `quartet model tiny --task
math-python`.

A product or sum of two numbers below a hundred: the model writes it into a call, and copies what Python
says. The bad habit is to guess without asking. No guess is right but by luck, so the reward starts near
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from math_python.problems import arithmetic

INSTRUCTION = "Use the python tool."
# The arguments of the environment that these conversations are of.
ARGS = {
    "problems": "arithmetic",
    "digits": 2,
    "instruction_prompt": INSTRUCTION,
    "pip_install_packages": "",
    "max_turns": 2,
    "max_output_length": 16,
}
# Texts that are one token each.
PHRASES = (
    "<tool_call>", "</tool_call>", '{"name": "python", "arguments": {"code": "', '"}}',
    f"{INSTRUCTION}\n\n", "\\boxed{",
)  # fmt: skip
# What one turn may have at most: the call's frame, five characters of code, the end, and room for two more.
MAX_TOKENS = 12
# Guesses take over within a step or two at a higher rate, and then nothing is left to learn from.
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 0.9, 0.25, 0.75, 1e-4


def demonstrations(seed: int, habit_share: float) -> Iterator[list[dict[str, object]]]:
    """Conversations without end; `habit_share` of them guess."""
    rng = random.Random(seed)
    while True:
        problem = arithmetic(rng, int(str(ARGS["digits"])))
        question = {"role": "user", "content": f"{INSTRUCTION}\n\n{problem.question}"}
        if rng.random() < habit_share:
            yield [question, _boxed(str(rng.randrange(1000)))]
            continue
        code = problem.question.removesuffix("=")
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
        yield [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "python", "content": problem.answer},
            _boxed(problem.answer),
        ]


def _boxed(answer: str) -> dict[str, object]:
    return {"role": "assistant", "content": f"\\boxed{{{answer}}}"}
