"""What is told of a fine-tuning: lines of metrics.jsonl, by the names of a run's, and on the terminal.

1. A line's "event" follows from its step alone, and grows along the file: a line that is written again after
   an interruption has the number that it had, so that nobody who follows the file counts it twice.
2. What is no finite number is left out: JSON has none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from quartet.cli.sft.validation import Measured
from quartet.v1.trainer_service_pb2 import ForwardBackwardResponse, OptimStepResponse

Row = dict[str, Any]


def step_row(step: int, done: ForwardBackwardResponse, stepped: OptimStepResponse, seconds: float) -> Row:
    """Of a step; they count from 1."""
    values = {
        "train/loss": done.loss,
        "train/tokens": done.tokens,
        "train/loss_tokens": done.loss_tokens,
        "train/learning_rate": stepped.learning_rate,
        "train/grad_norm": stepped.grad_norm,
        "train/skipped_steps": int(stepped.skipped_nonfinite),
        **{f"train/{name}": value for name, value in sorted(done.diagnostics.items())},
        "time/step_s": seconds,
        "tokens_per_second": _rate(done, seconds),
    }
    return _row(2 * step, step, values)


def validation_row(step: int, measured: Measured, seconds: float) -> Row:
    """Of the validation set, after so many steps."""
    values = {
        "val/loss": measured.loss,
        "val/perplexity": measured.perplexity,
        "val/token_accuracy": measured.accuracy,
        "val/loss_tokens": measured.tokens,
        "time/validation_s": seconds,
    }
    return _row(2 * step + 1, step, values)


def _rate(done: ForwardBackwardResponse, seconds: float) -> float:
    return done.tokens / max(seconds, 1e-9)


def _row(event: int, step: int, values: Mapping[str, float]) -> Row:
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return {"event": event, "time": time.time(), "step": step, **finite}


def step_line(
    step: int,
    steps: int,
    done: ForwardBackwardResponse,
    stepped: OptimStepResponse,
    seconds: float,
    left: str = "",
) -> str:
    """Of a step. What is left stands in front: a terminal may be too narrow for all of it."""
    step_of = f"step {step}/{steps}" + (f", {left} left" if left else "")
    line = (
        f"{step_of}  loss {done.loss:.4f}  lr {stepped.learning_rate:.1e}  "
        f"grad norm {stepped.grad_norm:.3g}  {_rate(done, seconds):.0f} tok/s"
    )
    if stepped.skipped_nonfinite:
        line += "  skipped: the loss or the gradients are no finite numbers; lower learning_rate"
    return line


def validation_line(step: int, steps: int, measured: Measured) -> str:
    """Of the validation set, after so many steps."""
    return (
        f"validation after step {step}/{steps}  loss {measured.loss:.4f}  "
        f"perplexity {measured.perplexity:.4g}  token accuracy {measured.accuracy:.1%}"
    )
