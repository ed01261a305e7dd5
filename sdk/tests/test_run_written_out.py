"""Runs that say a default and runs that leave it out are one run; all others are others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from quartet.cli.job import plan, write_down
from quartet.config import ConfigError
from quartet.local.toml_text import dumps
from quartet.run.config import parse_run
from quartet.run.operation import computes_the_same, differences
from quartet.run.presets import PRESETS
from quartet.run.written_out import is_same_run, written_out

#: Of the presets, those that a release had.
RELEASED = (
    *("grpo", "dr_grpo", "dapo", "cispo", "gspo", "luspo", "dppo", "sapo", "vespo", "rloo", "reinforce_pp"),
    *("max_rl", "sft", "opd"),
)
ENV = '[[env]]\nid = "toy"\n'

#: Runs that leave something out, and the same with that written.
ALIKE = [
    ("", 'algorithm = { preset = "cispo" }'),
    ("", "algorithm = { clip_high = 4.0 }"),
    ("", "algorithm = { epsilon_high = 4.0 }"),
    ("", 'algorithm = { loss = "cispo", advantage = "grpo", aggregation = "token" }'),
    ("", 'on_environment_change = "warn"'),
    ("", "sampling = { top_p = 1.0, top_k = 0, min_p = 0.0, repetition_penalty = 1.0, min_tokens = 0 }"),
    ('algorithm = { preset = "grpo" }', 'algorithm = { loss = "ppo", aggregation = "sequence" }'),
    (
        'algorithm = { loss = "ppo", advantage = "dr_grpo" }\nsampling = { max_tokens = 9 }',
        'algorithm = { preset = "dr_grpo", constant_tokens = 9 }\nsampling = { max_tokens = 9 }',
    ),
    ('algorithm = { preset = "sapo" }', 'algorithm = { preset = "sapo", tau_positive = 1.0 }'),
    ('algorithm = { preset = "vespo" }', 'algorithm = { preset = "vespo", kernel = {} }'),
    ("algorithm = { dynamic_sampling = true }", "algorithm = { dynamic_sampling = true, max_resample = 10 }"),
    (
        "algorithm = { target_entropy = 0.5 }",
        "algorithm = { target_entropy = 0.5, entropy_coef_delta = 0.005 }",
    ),
    ("algorithm = { kl_coef = 0.1 }", "kl_penalty = { enabled = true, beta = 0.1 }"),
    ("algorithm = { kl_coef = 0.1 }", "algorithm = { kl_coef = 0.1, reference = {} }"),
    ("", "lora = { enabled = false, r = 8 }"),
    ("", "difficulty_filter = { enabled = false, max_resample = 3 }"),
    ('optimizer = "muon"', 'optimizer = "muon"\nmomentum = 0.95\nadamw_learning_rate = 1e-6'),
    ('optimizer = "sgd"', 'optimizer = "sgd"\nmomentum = 0.9'),
    ('compute_dtype = "float32"', 'compute_dtype = "float32"\nserved_dtype = "float32"'),
    ("", "eval.sampling = { temperature = 1.0, top_p = 1.0 }"),
    ("eval.temperature = 0.5", "eval.sampling.temperature = 0.5"),
    (
        'eval = { temperature = 0.0, env = [{ id = "toy" }] }',
        'eval = { temperature = 0.0, env = [{ id = "toy", sampling = { temperature = 0.0, top_k = 0 } }] }',
    ),
    ("sampling = { top_k = 9 }", "sampling = { top_k = 9 }\neval.sampling = { top_k = 9 }"),
    ("", "env.sampling = { stop = [], top_p = 1.0 }"),
    ("sampling = { top_k = 9 }", "sampling = { top_k = 9 }\nenv.sampling = { top_k = 9 }"),
    ("", "sampling = { template_settings = {} }"),
    (
        "sampling = { template_settings = { short = true } }",
        "sampling = { template_settings = { short = true } }\n"
        "env.sampling = { template_settings = { short = true } }",
    ),
]
#: Runs that differ, if by little.
APART = [
    ("", "env.args = { words = [] }", "env.0.args.words is another"),
    (
        "sampling = { template_settings = { short = {} } }",
        "",
        "template_settings.short was {} and is nothing",
    ),
    ('sampling = { stop = ["a"] }', "", 'sampling.stop.0 was "a" and is nothing'),
    ("", "algorithm = { clip_high = 4.5 }", "algorithm.clip_high was 4.0 and is 4.5"),
    ("", 'algorithm = { preset = "grpo" }', 'algorithm.loss was "cispo" and is "ppo"'),
    ("", 'algorithm = { preset = "rloo" }', 'algorithm.advantage was "grpo" and is "rloo"'),
    (
        'algorithm = { preset = "grpo" }',
        'algorithm = { preset = "grpo", clip_low = 0.1 }',
        "algorithm.clip_low was 0.2 and is 0.1",
    ),
    (
        'algorithm = { preset = "dr_grpo" }\nsampling = { max_tokens = 9 }',
        'algorithm = { preset = "dr_grpo", constant_tokens = 8 }\nsampling = { max_tokens = 9 }',
        "algorithm.constant_tokens was 9 and is 8",
    ),
    (
        'algorithm = { preset = "sapo" }',
        'algorithm = { preset = "sapo", tau_negative = 1.0 }',
        "algorithm.tau_negative was 1.05 and is 1.0",
    ),
    ("", "algorithm = { dynamic_sampling = true }", "algorithm.dynamic_sampling was false and is true"),
    ("algorithm = { kl_coef = 0.1 }", "kl_penalty = { enabled = true, beta = 0.2 }", "algorithm.kl_coef"),
    ("", "sampling = { top_k = 1 }", "sampling.top_k was 0 and is 1"),
    ("", "sampling = { max_tokens = 9 }", "sampling.max_tokens was nothing and is 9"),
    ("", 'compute_dtype = "float32"', 'compute_dtype was nothing and is "float32"'),
    ("", 'optimizer = "sgd"', "momentum was nothing and is 0.9"),
    ('optimizer = "sgd"', 'optimizer = "sgd"\nmomentum = 0.8', "momentum was 0.9 and is 0.8"),
    ('optimizer = "muon"', 'optimizer = "muon"\nadamw_learning_rate = 1e-5', "adamw_learning_rate was 1e-06"),
    ("", "env.sampling = { top_k = 9 }", "env.0.sampling.top_k was nothing and is 9"),
    (
        "sampling = { top_k = 9 }\nenv.sampling = { top_k = 0 }",
        "sampling = { top_k = 9 }\nenv.sampling = { top_k = 9 }",
        "env.0.sampling.top_k was 0 and is nothing",
    ),
    ("", "eval.temperature = 0.5", "eval.sampling.temperature was nothing and is 0.5"),
    # What an evaluation says wins over what the environment of training says of itself.
    ("env.sampling = { top_k = 9 }", "env.sampling = { top_k = 9 }\neval.sampling = { top_k = 0 }", "top_k"),
]


def of(text: str):
    """Lines of a run; those that begin with "env." are the environment's."""
    lines = text.splitlines()
    own = [line.removeprefix("env.") for line in lines if line.startswith("env.")]
    around = [line for line in lines if not line.startswith("env.")]
    return parse_run("\n".join(['model = "m"', *around, ENV, *own]))


@pytest.mark.parametrize(("left_out", "written"), ALIKE)
def test_a_default_that_is_written_out_is_the_same_run(left_out: str, written: str) -> None:
    """written_out.py 1 and 2"""
    one, other = of(left_out), of(written)
    assert is_same_run(one, other) and is_same_run(other, one)
    assert computes_the_same(one, other) and not differences(one, other)


@pytest.mark.parametrize(("known", "asked", "told"), APART)
def test_what_really_differs_is_another_run(known: str, asked: str, told: str) -> None:
    one, other = of(known), of(asked)
    assert not is_same_run(one, other) and not computes_the_same(one, other)
    assert [difference for difference in differences(one, other) if told in difference]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "opd"])
def test_a_preset_is_its_values_and_no_two_are_alike(preset: str) -> None:
    size = "sampling = { max_tokens = 9 }"
    run = of(f'algorithm = {{ preset = "{preset}" }}\n{size}')
    values = ", ".join(line for line in dumps(dict(PRESETS[preset])).splitlines() if line)
    assert is_same_run(run, of(f"algorithm = {{ {values} }}\n{size}"))
    for other in PRESETS.keys() - {preset, "opd"}:
        assert not is_same_run(run, of(f'algorithm = {{ preset = "{other}" }}\n{size}')), other


@pytest.mark.parametrize("preset", [None, *(name for name in PRESETS if name != "opd")])
def test_a_record_of_a_run_is_that_run_whatever_its_preset_has_become(
    preset: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is written down with its values (cli/job.py), which win over what its preset is later; a file
    that names the preset alone is another run then, and is told so."""
    named = f'algorithm = {{ preset = "{preset}" }}' if preset else ""
    run = of(f"{named}\nsampling = {{ max_tokens = 9 }}")
    record = dumps(run.model_dump(mode="json", exclude_none=True))
    changed = {name: {**values, "advantage": "max_rl"} for name, values in PRESETS.items()}
    monkeypatch.setattr("quartet.run.algorithm.PRESETS", changed)
    assert parse_run(record) == run
    later = of(f"{named}\nsampling = {{ max_tokens = 9 }}")
    if preset and run.algorithm.advantage != "max_rl":
        was = f'algorithm.advantage was "{run.algorithm.advantage}" and is "max_rl"'
        assert was in differences(parse_run(record), later)


def test_a_preset_that_was_released_has_the_keys_that_it_had() -> None:
    """presets.py 1. To change one give it another name: records of runs, and files, say the old one."""
    digest = hashlib.sha256(json.dumps({name: dict(PRESETS[name]) for name in RELEASED}).encode()).hexdigest()
    assert digest.startswith("9c04ab78c9750a2e")


def test_a_run_is_resumed_with_a_default_written_out(tmp_path: Path) -> None:
    """Also one that was written down with the name of its preset, or without."""
    for begun, again in (("", 'algorithm = { preset = "cispo" }'), ('algorithm = { preset = "cispo" }', "")):
        folder = tmp_path / f"run{len(begun)}"
        job = plan(of(begun), folder, None, resume=False, overwrite=False)
        folder.mkdir()
        write_down(job, accepted=True)
        resumed = plan(of(again), folder, None, resume=True, overwrite=False)
        assert resumed.resumed and not resumed.carried_out_otherwise
        with pytest.raises(ConfigError, match=r"algorithm\.clip_high was 4\.0 and is 4\.5"):
            plan(of("algorithm = { clip_high = 4.5 }"), folder, None, resume=True, overwrite=False)


def test_what_is_written_out_says_so_again() -> None:
    for text in {text for pair in ALIKE for text in pair}:
        once = written_out(of(text))
        assert written_out(once) == once
