"""What a run advises about the environment of a script, which is what the script itself gives: the rows of
train_dataset, and functions. Other keys are as in every script (quartet.grpo.advised).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quartet.grpo.advised import ARGUMENTS, by_arguments
from quartet.trl.translate import ENVIRONMENT

#: By the names of TRL.
ADVISED: Final[Mapping[str, str]] = {**ARGUMENTS, "sampling.max_tokens": "max_completion_length"}
EASIER: Final = "give easier examples in train_dataset"
HARDER: Final = "give harder examples in train_dataset"
#: As the orchestrator says it (its advice.py and rollouts.py), in this order.
WORDS: Final = (
    (f"{ENVIRONMENT} is too hard as it is", "train_dataset is too hard as it is"),
    (f"{ENVIRONMENT} has little left to teach", "train_dataset has little left to teach"),
    (f"of the groups of {ENVIRONMENT} all rewards", "of the groups of train_dataset all rewards"),
    (f"tasks of environment '{ENVIRONMENT}'", "rows of train_dataset"),
    ("take args for easier examples", EASIER),
    # There is one environment, so that it has no weight.
    ("take args for harder examples, or a lower weight", HARDER),
)
TURNS: Final = ", or the turns that the environment allows"


def advised(told: str, *, has_turns: bool) -> str:
    """A line of the run; `has_turns`: whether a rollout may have several answers."""
    for of_a_run, here in WORDS:
        told = told.replace(of_a_run, here)
    turns = ", or args.max_tool_calling_iterations" if has_turns else ""
    return by_arguments(told.replace(TURNS, turns), ADVISED)
