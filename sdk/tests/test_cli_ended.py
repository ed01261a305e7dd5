"""What is said where a run has ended: what it came to, where that is, and what one does next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import build_parser
from quartet.cli.ended import Ended, say_ended
from quartet.cli.eval.command import read
from quartet.run.config import RunConfig
from quartet.run.evaluation import EvalEnvConfig
from quartet.run.sampling import EvalSamplingConfig

VALUES: dict[str, Any] = {"reward_before": 0.25, "reward_after": 0.5, "wall_seconds": 3.0, "notes": []}


@pytest.mark.parametrize(("steps", "told"), [(1, "in 1 step, 3 s"), (2, "in 2 steps, 3 s")])
def test_a_run_that_was_completed_says_in_how_many_steps(
    capsys: pytest.CaptureFixture[str], config: RunConfig, steps: int, told: str
) -> None:
    job = Mock(folder=Path("my run"), config=config)
    assert say_ended(job, Ended({"steps": steps, **VALUES}, completed=True)) == 0
    model = "'my run/checkpoint'"
    assert capsys.readouterr().out == (
        f"completed: reward 0.250 -> 0.500 {told}\n"
        "checkpoint, metrics and figure: my run\n"
        f"talk to it: python -m quartet_inference --model {model} --openai.address 127.0.0.1:8000\n"
        f"measure it: quartet eval reverse-text -m {model} -t 13\n"
    )
    job.config = config.model_copy(update={"external_trainer": True})
    assert say_ended(job, Ended({"steps": steps, **VALUES}, completed=True)) == 0
    assert capsys.readouterr().out.endswith("\nmetrics and figure: my run\n"), "the model is elsewhere"


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ({"game": {"red": -0.25, "blue": 0.25}}, "blue 0.250 -> 0.500, red -0.250 -> (not measured)"),
        (
            {"game": {"red": -0.25, "blue": 0.25}, "sums": {}},
            "0.250 -> 0.500 (game blue 0.250 -> 0.500, game red -0.250 -> (not measured))",
        ),
    ],
)
def test_a_run_whose_agents_are_rewarded_apart_says_what_each_earned(
    capsys: pytest.CaptureFixture[str], config: RunConfig, measured: dict[str, Any], told: str
) -> None:
    """Together the sides of a game may earn nothing; where that is not all that was measured, beside it."""
    after = {env: {"blue": 0.5} if roles else {} for env, roles in measured.items()}
    summary = {"steps": 2, **VALUES, "agents_before": measured, "agents_after": after}
    say_ended(Mock(folder=Path("run"), config=config), Ended(summary, completed=True))
    assert capsys.readouterr().out.startswith(f"completed: reward {told} in 2 steps, 3 s\n")


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
    say_ended(job, Ended({"steps": 1, **VALUES}, completed=True))
    measures = [one for one in capsys.readouterr().out.splitlines() if one.startswith("measure it")]
    expected = f"measure it: quartet eval reverse-text -m run/checkpoint -t 13{told}"
    assert measures == ([] if told is None else [expected])
    if told is not None:
        options, rest = build_parser().parse_known_args(shlex.split(expected)[3:])
        trial = read(options, rest)
        assert trial.trials[0].hosted.args == args and trial.envhost == envhost
        assert trial.trials[0].sampling.max_tokens == config.sampling.max_tokens


def test_what_was_measured_is_what_is_measured_again(
    capsys: pytest.CaptureFixture[str], config: RunConfig
) -> None:
    """The rewards that are told are those of [[eval.env]], where there is one, sampled as evaluations are."""
    other = EvalEnvConfig(id="reverse-text", args={"min_chars": 3})
    sampling = EvalSamplingConfig(max_tokens=20, temperature=0.0)
    measured = config.eval.model_copy(update={"env": (other,), "sampling": sampling})
    job = Mock(folder=Path("run"), config=config.model_copy(update={"eval": measured}))
    say_ended(job, Ended({"steps": 1, **VALUES}, completed=True))
    assert capsys.readouterr().out.endswith(""" -m run/checkpoint -t 20 -T 0 -a '{"min_chars": 3}'\n""")
    sampling = EvalSamplingConfig(
        top_p=0.9, presence_penalty=-0.5, stop=("it's\n",), template_settings={"enable_thinking": False}
    )
    job.config = config.model_copy(update={"eval": measured.model_copy(update={"sampling": sampling})})
    say_ended(job, Ended({"steps": 1, **VALUES}, completed=True))
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("measure it"))
    options, rest = build_parser().parse_known_args(shlex.split(line)[3:])
    (trial,) = read(options, rest).trials
    assert trial.sampling == sampling.model_copy(update={"max_tokens": config.sampling.max_tokens})
    sampling = EvalSamplingConfig(stop=("long" * 50,) * 2)
    job.config = config.model_copy(update={"eval": measured.model_copy(update={"sampling": sampling})})
    say_ended(job, Ended({"steps": 1, **VALUES}, completed=True))
    assert "measure it" not in capsys.readouterr().out, "no line to copy"


def test_what_was_said_again_with_other_numbers_is_told_as_it_was_last(
    capsys: pytest.CaptureFixture[str], config: RunConfig
) -> None:
    notes = ["90% of a are equal", "lower learning_rate", "91.5% of a are equal", "91% of b are equal"]
    job = Mock(folder=Path("run"), config=config)
    say_ended(job, Ended({"steps": 1, **VALUES, "notes": notes}, completed=True))
    said = [one for one in capsys.readouterr().out.splitlines() if "said on the way" in one]
    assert said == [f"it was said on the way: {notes[at]}" for at in (2, 1, 3)]


def test_what_an_environment_said_gives_the_terminal_no_commands(
    capsys: pytest.CaptureFixture[str], config: RunConfig
) -> None:
    summary = {"steps": 1, **VALUES, "notes": ["its error: \x1b[2J\x00"]}
    say_ended(Mock(folder=Path("run"), config=config), Ended(summary, completed=True))
    assert capsys.readouterr().out.endswith("it was said on the way: its error: \\x1b[2J\\x00\n")
