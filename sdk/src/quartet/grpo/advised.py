"""What a run advises, in the words of a script: its keys are arguments there, or stand in args.overrides.

1. Only what a person is to change is said otherwise; what was seen stays as it is, and so does every line
   that advises nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: What the orchestrator advises (its advice.py, stability.py, rollouts.py) that is an argument of both.
ARGUMENTS: Final[Mapping[str, str]] = {
    "learning_rate": "learning_rate",
    "rollouts_per_example": "num_generations",
    "sampling.temperature": "temperature",
    "max_grad_norm": "max_grad_norm",
    "algorithm.kl_coef": "beta",
}
#: Keys that no argument says.
LAID_OVER: Final = ("max_off_policy_steps", "max_prompt_tokens")
TABLES: Final = (
    ("hold the policy with [kl_penalty]", "hold the policy with a larger args.beta"),
    (
        "[difficulty_filter] replaces such groups",
        'args.overrides = {"difficulty_filter": {"enabled": True}} replaces such groups',
    ),
    ("wider bounds in [difficulty_filter]", 'wider bounds in args.overrides["difficulty_filter"]'),
    ("algorithm.overlong_penalty takes", 'args.overrides["algorithm"]["overlong_penalty"] takes'),
    ("quartet sft before", "an SFTTrainer before"),
)


#: What arguments come to together, so that none of them has its value.
_BATCH: Final = re.compile(r"\bbatch_size \(now (\d+)\)")


def by_arguments(told: str, arguments: Mapping[str, str]) -> str:
    """A line of the run; `arguments` has ARGUMENTS, and those that are called so in this kind of script."""
    for table, here in TABLES:
        told = told.replace(table, here)
    told = _BATCH.sub(r"args.per_device_train_batch_size (a batch has \1 now)", told)
    keys = "|".join(map(re.escape, (*arguments, *LAID_OVER)))
    # What is to be changed is "KEY (now VALUE)"; or of a bound "KEY = VALUE tokens", "a larger KEY (and",
    # "a larger KEY (of", "KEY ends each".
    advised = rf"(?<![\w.\"])({keys})(?= \(now | = \d+ tokens| \(and | \(of | ends each)"
    return re.sub(advised, lambda found: _called(found[1], arguments), told)


def _called(key: str, arguments: Mapping[str, str]) -> str:
    return f"args.{arguments[key]}" if key in arguments else f'args.overrides["{key}"]'
