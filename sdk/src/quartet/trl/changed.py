"""What is said of prompts and functions that are other ones than a run began with, in the words of a script.

1. To the run they are an environment at a host; whoever has a script knows them by the arguments in which it
   gives them. The digests, which nobody can read, are left out.
2. Where epochs count the steps, so do the rows: whoever took one away that was wrong is told how the run goes
   on all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from quartet.config.model import ConfigError
from quartet.trl.translate import ENVIRONMENT

#: As the orchestrator says it (its sameness.py).
_CHANGED: Final = re.compile(
    rf"environment '{ENVIRONMENT}' at the host \S+ is not what the run began with: "
    r"(?P<differences>.*?)(?:, )?digest \w+ -> \w+"
)
#: As quartet.cli.job refuses to go on, in steps of the run.
_LONGER: Final = re.compile(r"max_steps was (\d+) and is (\d+)")
_EXAMPLES: Final = re.compile(r"its examples(?: \((\d+) and \d+ -> (\d+) and \d+\))?")


def in_a_script(told: str, prompts: Sequence[str], called: Sequence[str]) -> str:
    """What a run says; `prompts` are the arguments with prompts that the script gives, `called` those with
    functions."""

    def rows(found: re.Match[str]) -> str:
        return " or ".join(prompts) + (f" ({found[1]} rows -> {found[2]})" if found[1] else "")

    def sentence(found: re.Match[str]) -> str:
        what = _EXAMPLES.sub(rows, found["differences"]).replace("its rewards", "reward_funcs")
        # Where there is none, it is in what neither the first prompts nor names tell.
        return f"changed since the run began: {what or ' or '.join([*prompts, *called])}"

    return _CHANGED.sub(sentence, told)


def by_epochs(refused: ConfigError, epochs: float, rows: int, steps_per_batch: int) -> ConfigError:
    """Why a run does not go on whose epochs are over so many rows now."""
    if (found := _LONGER.search(str(refused))) is None:
        return refused
    was, now = (int(batches) * steps_per_batch for batches in found.groups())
    return ConfigError(
        f"train(resume_from_checkpoint=True): args.num_train_epochs = {epochs:g} over the {rows} rows of "
        f"train_dataset comes to {now} steps, and the run was begun with {was}; set args.max_steps = {was} "
        "to go on with it, or give epochs and rows as they were"
    )
