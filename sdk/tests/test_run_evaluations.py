"""[eval] of a run: what is measured, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from quartet.cli.display import eval_line
from quartet.cli.run_file import load_run
from quartet.config import ConfigError, load
from quartet.run.config import RunConfig, parse_run
from quartet.run.evaluation import ALL_EXAMPLES, parse_evaluation
from quartet.run.sampling import SamplingConfig
from quartet.v1.orchestrator_service_pb2 import EvalEvent

RUN = 'model = "m"\n[[env]]\nid = "a"\n[[env]]\nid = "b"\n'


def test_evaluations_are_on_what_is_trained_unless_they_say_where() -> None:
    run = parse_run(RUN + "[eval]\nnum_examples = 5\nrollouts_per_example = 3\n")
    assert [(t.name, t.num_examples, t.rollouts_per_example) for t in run.trials] == [
        ("a", 5, 3),
        ("b", 5, 3),
    ]
    run = parse_run(
        RUN + "[eval]\nnum_examples = 5\n"
        '[[eval.env]]\nid = "c"\nargs = { level = 2 }\ntimeout_seconds = 9.5\n'
        '[[eval.env]]\nid = "c"\nname = "hard"\nnum_examples = 7\nrollouts_per_example = 2\n'
    )
    assert run.environment_ids == ["a", "b", "c"]
    first, second = run.trials
    assert (first.name, first.num_examples, first.rollouts_per_example) == ("c", 5, 1)
    assert (first.hosted.args, first.hosted.timeout_seconds) == ({"level": 2}, 9.5)
    assert (second.name, second.num_examples, second.rollouts_per_example) == ("hard", 7, 2)
    assert parse_run(RUN + "[eval]\nnum_examples = 0\n").trials == []


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('[[eval.env]]\nid = "c"\n[[eval.env]]\nid = "c"', "two are called 'c'; give each a name"),
        ('[eval.env]\nid = "c"', "write [[eval.env]] with two brackets"),
        ('[eval]\nnum_examples = 0\n[[eval.env]]\nid = "c"', "eval.env = [...] has nothing to evaluate"),
        ("[eval]\ntimeout_seconds = 0.0", "eval.timeout_seconds = 0.0 is refused"),
        ("[eval]\npass_threshold = nan", "eval.pass_threshold"),
        ('[[eval.env]]\nid = "c"\nweight = 1.0', "weight"),
        ('[[eval.env]]\nid = "c"\nrollouts_per_example = 2000', "rollouts_per_example = 2000 is refused"),
        ('[algorithm]\ndynamic_sampling = true\nadvantage = "none"', 'advantage = "none" learns without'),
        (
            "[eval]\ntemperature = 0.5\nsampling = { temperature = 0.2 }",
            "eval.temperature = 0.5 and eval.sampling.temperature = 0.2 are one setting; keep one of the two",
        ),
        ("[eval.sampling]\ntemperature = 0.009", "eval.sampling.temperature = 0.009 is refused: choose 0"),
        ("[eval.sampling]\ntmperature = 1", "did you mean 'eval.sampling.temperature'?"),
        ("[eval.sampling]\nmax_new_tokens = 1", "it is called 'eval.sampling.max_tokens' here"),
        ("[eval]\nmax_tokens = 9", "unknown key 'eval.max_tokens'; did you mean 'eval.sampling.max_tokens'?"),
        ("[eval]\nsamplig = {}", "unknown key 'eval.samplig'; did you mean 'eval.sampling'?"),
        ("[eval]\nsampling = 3", "eval.sampling = 3 is refused: write a table [eval.sampling]"),
        (
            "[env.sampling]\ntop_pp = 1",
            "unknown key 'env.1.sampling.top_pp'; did you mean 'env.1.sampling.top_p'",
        ),
        ("max_tokens = 9", "unknown key 'env.1.max_tokens'; did you mean 'env.1.sampling.max_tokens'?"),
        ("seed = 9", "'seed' belongs above the first table of the file; what the environment itself takes"),
        ("[env.sampling]\nmax_completion_tokens = 9", "it is called 'env.1.sampling.max_tokens' here"),
        ("[env.sampling]\nmax_tokens = 0", "env.1.sampling.max_tokens = 0 is refused: should be greater"),
        (
            "[env.sampling]\ntemperature = 0.5",
            "unknown key 'env.1.sampling.temperature'; the loss of a batch reads one temperature: set "
            "'sampling.temperature', which holds for all environments",
        ),
        (
            "[env.sampling]\nfrequency_penalty = 0.5\n[checks]\nverify_logprobs = true",
            "env.1.sampling.frequency_penalty = 0.5 makes log-probabilities that the trainer cannot verify",
        ),
        (
            '[env.sampling]\nmax_tokens = 9\n[algorithm]\npreset = "dr_grpo"',
            "sampling.max_tokens is not set, and algorithm.aggregation",
        ),
        ("[algorithm]\nmax_resample = 3", "max_resample bounds dynamic_sampling, which is off"),
        ("[algorithm]\ndynamic_sampling = true\nmax_resample = 0", "algorithm.max_resample = 0 is refused"),
    ],
)
def test_what_cannot_be_evaluated_or_sampled_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(RUN + text)
    assert refusal in str(caught.value)


def test_an_evaluation_that_never_fits_is_refused() -> None:
    text = "max_concurrent = 8\n" + RUN + '[[eval.env]]\nid = "c"\nrollouts_per_example = 9\n'
    with pytest.raises(ConfigError, match=r"is less than eval\.rollouts_per_example = 9"):
        parse_run(text)


SAMPLED = """
[env.sampling]
max_tokens = 7
stop = []
[sampling]
max_tokens = 5
stop = ["x"]
seed = 3
"""


def sampled(text: str) -> dict[str, tuple[int | None, float | None, tuple[str, ...] | None]]:
    """Of each environment that a run evaluates on."""
    trials = parse_run(RUN + SAMPLED + text).trials
    return {
        one.name: (one.sampling.max_tokens, one.sampling.temperature, one.sampling.stop) for one in trials
    }


def test_the_nearest_table_says_how_an_evaluation_samples() -> None:
    assert sampled("") == {"a": (5, 1.0, ("x",)), "b": (7, 1.0, ())}
    assert sampled("[eval.sampling]\nmax_tokens = 9\ntemperature = 0.0") == {
        "a": (9, 0.0, ("x",)),
        "b": (9, 0.0, ()),
    }
    own = '[[eval.env]]\nid = "b"\n[eval.env.sampling]\nmax_tokens = 11\ntemperature = 0.5\n'
    other = '[[eval.env]]\nid = "c"\n'
    assert sampled(f"[eval]\ntemperature = 0.0\n[eval.sampling]\nstop = []\n{own}{other}") == {
        "b": (11, 0.5, ()),
        "c": (5, 0.0, ()),
    }
    run = parse_run(RUN + SAMPLED)
    assert [run.sampling_of(env).max_tokens for env in run.env] == [5, 7]
    assert {run.sampling_of(env).seed for env in run.env} == {3}
    measured = parse_run(RUN + SAMPLED + "[eval]\ntemperature = 0.0\n[[eval.env]]\nid = 'c'\n").eval
    assert [measured.sampled(env, run.sampling).max_tokens for env in run.env] == [5, 7]
    assert {measured.sampled(env, run.sampling).temperature for env in run.env} == {0.0}
    asked = parse_evaluation("[sampling]\ntop_k = 2\n").trials(run.env, run.sampling)
    assert [(one.sampling.max_tokens, one.sampling.top_k) for one in asked] == [(5, 2), (7, 2)]


def test_the_run_that_is_shown_samples_as_the_one_that_was_read(tmp_path: Path) -> None:
    """That nothing stops an answer is said there, and what was not said is not."""
    (file := tmp_path / "run.toml").write_text(
        RUN + SAMPLED + '[eval.sampling]\ntop_p = 0.5\n[[eval.env]]\nid = "c"\n'
    )
    found = load_run(["@", str(file), "--env.0.sampling.top_k", "4", "--eval.sampling.max-tokens=6"])
    shown = tomllib.loads(found.toml)
    assert shown["eval"]["sampling"] == {"max_tokens": 6, "top_p": 0.5}
    assert [env["sampling"] for env in shown["env"]] == [{"top_k": 4}, {"max_tokens": 7, "stop": []}]
    assert "sampling" not in shown["eval"]["env"][0]
    assert parse_run(found.toml) == found.config


def test_a_temperature_of_evaluations_is_one_setting_in_two_places(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(RUN + "[eval.sampling]\ntemperature = 0.5\nmax_tokens = 3\n")
    run = load(RunConfig, ["@", str(file), "--eval.temperature", "0.0"]).config
    assert [(one.sampling.temperature, one.sampling.max_tokens) for one in run.trials] == [(0.0, 3)] * 2
    file.write_text(RUN + "[eval]\ntemperature = 0.5\n")
    run = load(RunConfig, ["@", str(file), "--eval.sampling.temperature", "0.25"]).config
    assert [one.sampling.temperature for one in run.trials] == [0.25] * 2


def test_dynamic_sampling_is_part_of_dapo_and_can_be_left_out() -> None:
    assert parse_run(RUN + '[algorithm]\npreset = "dapo"').algorithm.resamples == 10
    assert parse_run(RUN + '[algorithm]\npreset = "dapo"\nmax_resample = 3').algorithm.resamples == 3
    assert parse_run(RUN + '[algorithm]\npreset = "dapo"\ndynamic_sampling = false').algorithm.resamples == 0
    assert parse_run(RUN).algorithm.resamples == 0


def test_an_evaluation_without_a_result_shows_none() -> None:
    metrics = {"eval/coverage": 0.0, "eval/rollouts": 0.0}
    assert eval_line(EvalEvent(step=3, metrics=metrics)) == (
        "evaluation after 3 steps: no result, as none of its rollouts has one"
    )
    metrics = {"eval/reward": 0.5, "eval/coverage": 0.75}
    assert eval_line(EvalEvent(step=3, metrics=metrics)) == (
        "evaluation after 3 steps: reward 0.500  from 75% of its rollouts"
    )
    metrics = {"eval/reward": 0.5, "eval/x/y/reward": 0.25, "eval/z/reward": 0.75, "eval/coverage": 1.0}
    assert eval_line(EvalEvent(step=0, metrics=metrics)) == (
        "evaluation after 0 steps: reward 0.500  x/y 0.250  z 0.750"
    )


def test_an_evaluation_by_itself_is_said_like_one_of_a_run() -> None:
    asked = parse_evaluation(
        'num_examples = 5\n[sampling]\ntop_p = 0.5\n[[env]]\nid = "c"\nrollouts_per_example = 2\n'
    )
    (trial,) = asked.trials(parse_run(RUN).env, SamplingConfig())
    assert (trial.name, trial.num_examples, trial.rollouts_per_example) == ("c", 5, 2)
    assert (trial.sampling.top_p, trial.sampling.temperature) == (0.5, 1.0)
    of_all = parse_evaluation('num_examples = -1\n[[env]]\nid = "c"\n[[env]]\nid = "d"\nnum_examples = -1\n')
    inside = parse_run(RUN + "[eval]\nnum_examples = -1\n")
    for trials in (of_all.trials((), SamplingConfig()), inside.trials):
        assert [trial.num_examples for trial in trials] == [ALL_EXAMPLES] * 2
    everywhere = parse_evaluation("").trials(parse_run(RUN).env, SamplingConfig())
    assert [trial.name for trial in everywhere] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("num_examples = 0", "num_examples = 0 is refused"),
        ("num_examples = -2", "num_examples = -2 is refused"),
        ("before = false", "unknown key 'before'"),
        ("temperature = 0.0", "unknown key 'temperature'"),
        ("[sampling]\ntemperature = 0.009", "sampling.temperature = 0.009 is refused: choose 0 for greedy"),
        ('[env]\nid = "c"', "write [[env]] with two brackets"),
        ('[[env]]\nid = "c"\nrollouts_per_example = 64', "set max_concurrent to at least 64"),
        ("num_examples =", "the evaluation is not valid TOML"),
        pytest.param("a = " + "[" * 100_000, "the evaluation is nested too deeply", id="nested"),
    ],
)
def test_evaluations_by_themselves_that_make_no_sense(text: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        parse_evaluation(text)


def test_no_examples_switch_evaluations_off_whatever_the_file_says(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(
        'model = "m"\n[[env]]\nid = "e"\n[eval]\ninterval = 10\n[[eval.env]]\nid = "other"\n'
    )
    run = load(RunConfig, ["@", str(file), "--eval.num-examples", "0"]).config
    assert run.trials == [] and run.eval.interval == 0 and run.environment_ids == ["e"]
    assert load(RunConfig, ["@", str(file), "--eval.num-examples", "3"]).config.eval.interval == 10
    for options in (
        ["--eval.interval", "5", "--eval.num-examples=0"],
        ["--eval.num-examples=0", "@", str(file)],
    ):
        with pytest.raises(ConfigError, match="has nothing to evaluate"):
            load(RunConfig, ["@", str(file), *options])
