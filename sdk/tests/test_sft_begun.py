"""When a fine-tuning of a script has begun, and what its lines say (quartet.sft.begun)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.outputs import append_line
from quartet.cli.sft.place import cut_metrics, taken
from quartet.run.sft import SftConfig
from quartet.scripts.loop import Moment
from quartet.sft.begun import Begun, length_of, moment_of
from sft_chats import CHAT, written


def row(step: int, **more: float) -> dict[str, Any]:
    return {"event": 2 * step, "time": 1.0, "step": step, "train/loss": 0.5, **more}


def test_it_has_begun_when_it_says_how_long_it_is(chat_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=written(tmp_path, {"messages": CHAT}))
    with closing(Begun(output)) as begun:
        assert begun.steps() is None and begun.before == []
        with taken(output, config, resume=False, steps=9):
            assert begun.steps() == 9
    # Gone on with before there was a line: there is nothing to cut off.
    with closing(Begun(output)) as again:
        assert again.steps() == 9
    for step in range(1, 6):
        append_line(output / "metrics.jsonl", row(step))
    with closing(Begun(output)) as again:
        assert again.steps() is None, "it has read nothing yet"
        cut_metrics(output, 3)
        assert again.steps() == 9
        assert [one["step"] for one in again.before] == [1, 2, 3, 4, 5]
        # However often the file is another one.
        cut_metrics(output, 2)
        assert again.steps() == 9


def test_a_line_is_a_step_or_a_measurement() -> None:
    assert moment_of(row(3)) == Moment(3, {"step": 3, "loss": 0.5})
    # What is no finite number is left out.
    measured = {"step": 3, "val/loss_tokens": 7, "val/token_accuracy": 0.5}
    told = {"step": 3, "eval_mean_token_accuracy": 0.5}
    assert moment_of(measured) == Moment(3, told, is_evaluation=True)
    assert moment_of({"step": 4, "train/tokens": 7}) == Moment(4, {"step": 4})


@pytest.mark.parametrize(
    ("given", "steps", "of_epoch", "measured"),
    [
        ({"max_steps": 7}, 7, None, [0, 7]),
        ({"epochs": 3.0}, 9, 3, [0, 9]),
        ({"epochs": 2.5, "eval": {"epochs": 1.0}}, 8, 3, [0, 3, 6, 8]),
        ({"max_steps": 7, "eval": {"interval": 3, "before": False}}, 7, None, [3, 6, 7]),
        ({"max_steps": 7, "eval": {"interval": 3, "after": False}}, 7, None, [0, 3, 6]),
    ],
)
def test_its_length(given: dict[str, Any], steps: int, of_epoch: int | None, measured: list[int]) -> None:
    config = SftConfig.model_validate({"model": "m", "data": "d", "validation": "v", **given})
    found = length_of(config, steps)
    assert (found.max_steps, found.steps_of_epoch) == (steps, of_epoch)
    assert [step for step in range(steps + 1) if found.is_measured_after(step)] == measured
    never = length_of(config.model_copy(update={"validation": None}), steps)
    assert not any(map(never.is_measured_after, range(steps + 1)))
