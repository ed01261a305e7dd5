"""What scripts of both kinds stand on (quartet.scripts): which way imports go, and what all trainers say."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import quartet
from quartet.grpo import GRPOConfig, GRPOTrainer
from quartet.scripts import known
from quartet.scripts.adapter import LoraConfig, unnamed_modules
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.outcome import mean_loss
from quartet.scripts.trainer import OF_TRANSFORMERS, ScriptTrainer
from quartet.sft import SFTConfig, SFTTrainer

PACKAGE = Path(quartet.__path__[0])
OTHERS = {"scripts": ("grpo", "sft"), "grpo": ("sft",), "sft": ("grpo",)}


@pytest.mark.parametrize("package", OTHERS)
def test_promise_1_neither_kind_stands_on_the_other(package: str) -> None:
    files = sorted((PACKAGE / package).rglob("*.py"))
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found += [
                name for name in named if name.split(".")[:2] in [["quartet", o] for o in OTHERS[package]]
            ]
    assert files and found == []


def test_promise_1_and_what_both_stand_on_names_neither() -> None:
    for file in (PACKAGE / "scripts").glob("*.py"):
        text = file.read_text(encoding="utf-8").lower()
        assert "grpo" not in text and "sft" not in text, file


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer])
def test_every_trainer_says_what_is_done_inside_a_loop_that_is_elsewhere(kind: type[ScriptTrainer]) -> None:
    made = object.__new__(kind)
    for name, why in OF_TRANSFORMERS.items():
        with pytest.raises(AttributeError) as caught:
            getattr(made, name)
        assert str(caught.value) == f"{kind.__name__} has no {name!r} here: {why}"


@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_what_is_known_of_transformers_is_known_to_all(kind: type[ArgumentList]) -> None:
    args: Any = kind("out")
    for name, one in {**known.WITHOUT_EFFECT, **known.REFUSED}.items():
        assert kind.known()[name].why == one.why and getattr(args, name) == kind.known()[name].default
    assert args.without_effect() == [] and args.refuse() is None
    args.disable_tqdm, args.neftune_noise_alpha = True, 0.1
    (said,) = args.without_effect()
    assert said.startswith("args.disable_tqdm = True is without effect: a line is printed for each")
    assert args.without_effect({"disable_tqdm": True}) == []
    with pytest.raises(quartet.config.ConfigError, match=r"args\.neftune_noise_alpha = 0\.1 is refused"):
        args.refuse()


def test_an_adapter_of_all_modules_is_said() -> None:
    assert unnamed_modules({}) and not unnamed_modules({"target_modules": ["q_proj"]})
    assert LoraConfig().lora_alpha == 8


def test_the_mean_loss_is_over_steps() -> None:
    assert mean_loss([{"train/loss": 1.0}, {"val/loss": 9.0}, {"train/loss": 3.0}]) == 2.0
    assert mean_loss([]) != mean_loss([]), "nan before the first"
