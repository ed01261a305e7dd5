"""How many there are, in words (counted.py), where a person is told how something ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import build_parser
from quartet.cli.display import eval_line
from quartet.cli.ended import Ended, say_ended
from quartet.cli.eval.command import read
from quartet.counted import counted
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import EvalEvent


def test_one_of_them_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(("steps", "told"), [(1, "in 1 step, 3 s"), (2, "in 2 steps, 3 s")])
def test_a_run_that_was_completed_says_in_how_many_steps(
    capsys: pytest.CaptureFixture[str], config: RunConfig, steps: int, told: str
) -> None:
    values = {"reward_before": 0.25, "reward_after": 0.5, "wall_seconds": 3.0, "notes": []}
    job = Mock(folder=Path("my run"), config=config)
    assert say_ended(job, Ended({"steps": steps, **values}, completed=True)) == 0
    model = "'my run/checkpoint'"
    assert capsys.readouterr().out == (
        f"completed: reward 0.250 -> 0.500 {told}\n"
        "checkpoint, metrics and figure: my run\n"
        f"talk to it: python -m quartet_inference --model {model} --openai.address 127.0.0.1:8000\n"
        f"measure it: quartet eval reverse-text -m {model}\n"
    )
    job.config = config.model_copy(update={"external_trainer": True})
    assert say_ended(job, Ended({"steps": steps, **values}, completed=True)) == 0
    assert capsys.readouterr().out.endswith("\nmetrics and figure: my run\n"), "the model is elsewhere"


@pytest.mark.parametrize(
    ("args", "python", "told"),
    [
        ({"texts": ["it's"]}, None, """ -a '{"texts": ["it'"'"'s"]}'"""),
        ({}, "my envs/bin/python", " --envhost.python 'my envs/bin/python'"),
        ({"judge": {"api_key": "sk-1"}}, None, None),
        ({"texts": ["long"] * 100}, None, None),
    ],
)
def test_a_completed_run_says_how_it_is_measured_as_it_was_trained(
    capsys: pytest.CaptureFixture[str],
    config: RunConfig,
    args: dict[str, object],
    python: str | None,
    told: str | None,
) -> None:
    """But for keys, which a terminal's log would keep, and for arguments that are no line to copy."""
    env = config.env[0].model_copy(update={"args": args})
    envhost = {} if python is None else {"python": python}
    job = Mock(folder=Path("run"), config=config.model_copy(update={"env": (env,), "envhost": envhost}))
    values = {"reward_before": 0.25, "reward_after": 0.5, "wall_seconds": 3.0, "notes": []}
    say_ended(job, Ended({"steps": 1, **values}, completed=True))
    measures = [one for one in capsys.readouterr().out.splitlines() if one.startswith("measure it")]
    expected = f"measure it: quartet eval reverse-text -m run/checkpoint{told}"
    assert measures == ([] if told is None else [expected])
    if told is not None:
        options, rest = build_parser().parse_known_args(shlex.split(expected)[3:])
        trial = read(options, rest)
        assert trial.trials[0].hosted.args == args and trial.envhost == envhost


def test_an_evaluation_says_after_how_many() -> None:
    assert eval_line(EvalEvent(step=1)).startswith("evaluation after 1 step: ")
