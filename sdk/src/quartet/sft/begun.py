"""What a script hears of the fine-tuning that its command has begun: by its output folder.

1. It has begun once it says how many steps it has, which it does when the data are read. One that goes on
   has, once it has left out the lines of steps that it does again, by which metrics.jsonl is another file
   (place.py of quartet.cli.sft).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from quartet.run.sft import SftConfig
from quartet.scripts.loop import Length, Moment
from quartet.scripts.outcome import METRICS, Row, metrics_rows

#: Names of metrics.jsonl, by those of TRL.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "eval_loss": "val/loss",
    "eval_mean_token_accuracy": "val/token_accuracy",
    "eval_perplexity": "val/perplexity",
}
#: What every line of a measurement has.
MEASURED = "val/loss_tokens"


def moment_of(row: Row) -> Moment:
    """What a line of metrics says; each has a row of the history."""
    named = {name: row[key] for name, key in NAMES.items() if key in row}
    return Moment(row["step"], {"step": row["step"], **named}, is_evaluation=MEASURED in row)


def length_of(config: SftConfig, steps: int) -> Length:
    """Of one that has so many steps."""
    # The last batch of a pass is short, so that all passes have as many; with max_steps nobody says.
    of_pass = None if config.epochs is None else max(1, math.floor(steps / config.epochs + 1e-9))
    when = config.eval
    every = when.interval or (of_pass or 0) * (when.epochs or 0)

    def is_measured_after(step: int) -> bool:
        if config.validation is None or step == 0:
            return config.validation is not None and when.before
        return when.after if step == steps else bool(every) and step % every == 0

    return Length(steps, of_pass, is_measured_after)


class Begun:
    """Whether a command has begun in a folder, looked at from before it was started."""

    def __init__(self, folder: Path) -> None:
        """What is there now is what came before."""
        self._folder = folder
        file = folder / METRICS
        # Held: as long as it is, no other file is taken for it.
        self._held = file.open("rb") if file.exists() else None
        self.before = metrics_rows(folder)

    def close(self) -> None:
        """Nobody looks any more."""
        if self._held is not None:
            self._held.close()

    def steps(self) -> int | None:
        """How many it has; None before it has begun."""
        from quartet.cli.sft.place import begun_steps

        file = self._folder / METRICS
        if self._held is not None and os.path.samestat(os.fstat(self._held.fileno()), file.stat()):
            return None
        return begun_steps(self._folder)
