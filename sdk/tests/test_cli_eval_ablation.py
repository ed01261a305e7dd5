"""What a sweep of `quartet eval` stands for, and how a wrong one is refused: cli/eval/ablation.py 1 and 2."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from quartet.cli.__main__ import build_parser
from quartet.cli.eval.ablation import MAX_VALUE_CHARS
from quartet.cli.eval.command import plan_of, read
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.source import Source
from quartet.config import ConfigError
from quartet.config.load import validate

# Of the documentation of Verifiers' own command, but for the key of the number of examples.
FILE = """
num_examples = 10
[sampling]
max_tokens = 64
[[eval]]
id = "gsm8k"
[[ablation]]
id = "my-env"
num_examples = 5
sampling = { top_p = 0.9 }
args = { lines = 3 }
[ablation.sweep]
temperature = [0.0, 0.5, 1.0]
[ablation.sweep.args]
difficulty = ["easy", "hard"]
"""


def file_of(text: str) -> EvalFileConfig:
    return validate(EvalFileConfig, tomllib.loads(text))


def test_a_sweep_is_every_combination_of_its_values() -> None:
    plain, *swept = file_of(FILE).trials
    assert (plain.name, plain.num_examples, plain.hosted.args) == ("gsm8k", 10, {})
    assert [(one.sampling.temperature, one.hosted.args) for one in swept] == [
        (temperature, {"lines": 3, "difficulty": difficulty})
        for temperature in (0.0, 0.5, 1.0)
        for difficulty in ("easy", "hard")
    ]
    assert swept[3].name == "my-env temperature=0.5 difficulty=hard"
    for one in swept:
        assert (one.hosted.id, one.num_examples) == ("my-env", 5)
        assert (one.sampling.max_tokens, one.sampling.top_p) == (64, 0.9), "of the file, and of the table"


def test_keys_of_an_evaluation_are_swept_and_long_values_are_told_by_their_place() -> None:
    texts = ["x" * (MAX_VALUE_CHARS + 1), "y" * 300]
    text = f"""
[[ablation]]
id = "e"
name = "prompts"
[ablation.sweep]
rollouts_per_example = [1, 4]
args = {{ system_prompt = {texts} }}
"""
    trials = file_of(text).trials
    assert [(one.name, one.rollouts_per_example) for one in trials] == [
        ("prompts rollouts_per_example=1 system_prompt=#1", 1),
        ("prompts rollouts_per_example=1 system_prompt=#2", 1),
        ("prompts rollouts_per_example=4 system_prompt=#1", 4),
        ("prompts rollouts_per_example=4 system_prompt=#2", 4),
    ]
    assert [one.hosted.args["system_prompt"] for one in trials] == texts * 2


def test_promise_2_values_that_a_folder_cannot_tell_apart_are_told_by_their_place(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    values = 'language = ["中文", "日本語", "de"]\nsign = ["+", "+=", "-"]'
    file.write_text(
        f'model = "m"\n[[ablation]]\nid = "e"\n[ablation.sweep.args]\n{values}\n', encoding="utf-8"
    )
    options, rest = build_parser().parse_known_args(["eval", "@", str(file), "-o", str(tmp_path)])
    plan = plan_of(read(options, rest), Source("m"), options)
    assert [one.trial.name for one in plan.records] == [
        f"e language={language} sign={sign}" for language in ("#1", "#2", "de") for sign in ("#1", "#2", "-")
    ]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("", "sweep names nothing"),
        ("temperature = 0.5", "sweep.sampling.temperature = 0.5 is no list of values"),
        ("args = { n = [] }", "sweep.args.n = [] is no list of values"),
        ("args = [1]", "sweep.args is a table of lists; write [ablation.sweep.args]"),
        ("args = { lines = [1, 2] }", "args.lines is said once, and swept, too"),
        ("num_examples = [1, 2]", "num_examples is said once, and swept, too"),
        ("temperature = [0.0, 'hot']", "sampling.temperature = 'hot' is refused"),
        ("tempratur = [0.0, 1.0]", "tempratur"),
        ("model = ['a', 'b']", "model"),
        (f"timeout_seconds = {list(range(1, 102))}", "sweep has 101 combinations; at most 100"),
        ("timeout_seconds = [5, 5]", "two evaluations are called"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused(sweep: str, said: str) -> None:
    text = f'[[ablation]]\nid = "e"\nnum_examples = 3\nargs = {{ lines = 3 }}\n[ablation.sweep]\n{sweep}\n'
    with pytest.raises(ConfigError, match=re.escape(said)):
        file_of(text)


def test_each_combination_has_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'model = "m"\n{FILE}')
    options, rest = build_parser().parse_known_args(["eval", "@", str(file), "-o", str(tmp_path)])
    plan = plan_of(read(options, rest), Source("m"), options)
    folders = [record.folder.parent.name for record in plan.records]
    assert folders[:2] == ["gsm8k--m", "my-env--temperature--0.0--difficulty--easy--m"]
    assert len(set(folders)) == 7
    with pytest.raises(ConfigError, match=r"write \[\[ablation\]\] with two brackets"):
        file_of('[ablation]\nid = "e"\n')
