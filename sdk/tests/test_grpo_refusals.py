"""What GRPOConfig does not take: refused by its name, in a sentence that says what would be right."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import quartet.grpo as vf
from grpo_script import translated
from quartet.cli.wandb import place
from quartet.grpo.of_trl import CONFIG
from quartet.grpo.untranslated import REFUSED
from quartet.scripts.models import Model, Tokenizer
from quartet.scripts.reports import project_of


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_otherwise_is_refused(name: str) -> None:
    default = REFUSED[name].default
    other = (not default) if isinstance(default, bool) else 1
    with pytest.raises(vf.ConfigError, match=rf"^args\.{name} = {other!r} is refused: ") as refused:
        translated(**{name: other})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", CONFIG)
def test_what_trl_has_beside_is_refused_with_what_to_write(name: str) -> None:
    """of_trl.py 1"""
    with pytest.raises(vf.ConfigError, match=rf"^args\.{name}: there is no such argument; ") as refused:
        translated(**{name: 1})
    assert CONFIG[name] in str(refused.value) and "\n" not in str(refused.value)


def test_trl_has_them() -> None:
    from trl import GRPOConfig

    assert CONFIG.keys() <= {field.name for field in dataclasses.fields(GRPOConfig)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"scale_rewards": "batch"}, "args.scale_rewards = 'batch' is refused: should be True"),
        ({"scale_rewards": "sometimes"}, 'True ("group") or False ("none")'),
        ({"num_generations": 7}, "args.num_generations = 7 does not divide the 32 rollouts of a batch"),
        ({"num_generations": 1}, "args.num_generations = 1 is refused: should be a whole number from 2"),
        ({"generation_batch_size": 48}, "48 rollouts are no multiple of the 32 of an optimizer step"),
        ({"generation_batch_size": 64, "steps_per_generation": 8}, "say the same; give one"),
        ({"max_steps": -1}, "args.max_steps = -1 is refused: a run is as many optimizer steps as this says"),
        ({"per_device_train_batch_size": "8"}, "args.per_device_train_batch_size = '8' is refused"),
        ({"learning_rate": "1e-6"}, "args.learning_rate = '1e-6' is refused: should be a number"),
        ({"temperature": 0.0}, "args.temperature = 0.0 is refused: a greedy group"),
        ({"beta": -1.0}, "args.beta = -1.0 is refused"),
        ({"delta": 1.1}, "it; raise it, or remove one of them (algorithm.clip_high is args"),
        ({"num_batches_ahead": 25}, "args.num_batches_ahead = 25 is refused"),
        ({"max_concurrent": 3}, "args.max_concurrent = 3 is refused: a group has"),
        ({"loss_type": "dpo"}, "args.loss_type = 'dpo' is refused: should be one of grpo, bnpo, dr_grpo"),
        ({"loss_type": "sapo"}, '; or give overrides = {"algorithm": {"preset": "sapo"}} in its place'),
        ({"loss_type": "vespo"}, '; or give overrides = {"algorithm": {"preset": "vespo"}} in its place'),
        ({"lr_scheduler_type": "polynomial"}, "should be one of constant, constant_with_warmup, linear"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "constant_with_warmup takes none"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, 'cosine_with_min_lr takes {"min_lr": RATE} or'),
        ({"eval_strategy": "epoch"}, "args.eval_strategy = 'epoch' is refused: should be one of no, steps"),
        ({"save_steps": 0}, "args.save_steps = 0 is refused"),
        ({"optim": "adafactor"}, "args.optim = 'adafactor' is refused"),
        ({"overrides": {"model": "m"}}, "'model' is refused: give GRPOTrainer another model"),
        ({"overrides": {"tranier": {}}}, "unknown key 'tranier'; did you mean 'trainer'?"),
        ({"overrides": {"foo": 1}}, "unknown key 'foo'; known keys here"),
        ({"overrides": {"sampling": {"temprature": 1}}}, "unknown key 'sampling.temprature'; did you mean"),
        ({"overrides": {"sampling": {"top_p": 3}}}, "sampling.top_p = 3 is refused"),
        ({"overrides": {"sampling": {1: 3}}}, "args.overrides: 1 is refused: should be the name of a key"),
        ({"warmup_steps": 0, "warmup_ratio": 3}, "args.warmup_ratio = 3 is refused: should be a share of"),
        ({"max_steps": 10.5}, "args.max_steps = 10.5 is refused: should be a whole number from 1"),
        ({"async_generation_timeout": -1}, "args.async_generation_timeout = -1 is refused"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vf.ConfigError) as refused:
        translated(**given)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_all_that_is_wrong_is_refused_by_its_own_name() -> None:
    with pytest.raises(vf.ConfigError) as refused:
        translated(beta=-1.0, temperature=0.0, overrides={"tranier": {}})
    assert str(refused.value).split("\n  also: ")[0].startswith("unknown key 'tranier'")
    assert {str(one).split(" ")[0] for one in refused.value.each[1:]} == {"args.beta", "args.temperature"}


def test_all_arguments_that_there_are_not_are_told_at_once() -> None:
    with pytest.raises(vf.ConfigError) as refused:
        vf.GRPOConfig(use_vllm=True, beta=0.1, learningrate=1, temperature="hot")
    assert [str(one).partition(":")[0].split(" ")[0] for one in refused.value.each] == [
        "args.use_vllm",
        "args.learningrate",
        "args.temperature",
    ]
    with pytest.raises(vf.ConfigError) as refused:
        vf.GRPOTrainer(model="m", reward_funcs=print, train_dataset=[], env=None)
    assert [str(one).partition("=")[0] for one in refused.value.each] == [
        "GRPOTrainer(reward_funcs",
        "GRPOTrainer(train_dataset",
    ]


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    args = vf.grpo_defaults("r")
    with pytest.raises(vf.ConfigError, match=r"args\.num_generation: .* did you mean 'num_generations'"):
        args.num_generation = 4
    with pytest.raises(vf.ConfigError, match="did you mean 'learning_rate'"):
        vf.GRPOConfig(learningrate=1)
    with pytest.raises(vf.ConfigError, match="did you mean 'learning_rate'"):
        args.lr = 1
    with pytest.raises(vf.ConfigError, match="did you mean 'num_generations'"):
        args.rollouts_per_example = 4
    with pytest.raises(vf.ConfigError, match=r"docs/python\.md lists them"):
        args.zzz = 4
    with pytest.raises(AttributeError, match="did you mean 'epsilon'"):
        _ = args.epsilonn


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("learning_rate", "1e-5", "a number"),
        ("warmup_steps", float("nan"), "a number"),
        ("logging_steps", float("inf"), "a number"),
        ("max_steps", True, "a number"),
        ("num_generations", None, "a number"),
        ("overrides", None, "a dict"),
        ("lr_scheduler_kwargs", 3, "a dict"),
        ("run_name", 5, "text"),
        ("output_dir", None, "text"),
        ("report_to", 5, "text"),
        ("overwrite_output_dir", "no", "True or False"),
        ("bf16", "false", "True or False"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_is_set(name: str, value: Any, wanted: str) -> None:
    args = vf.grpo_defaults(run_name="r")
    with pytest.raises(vf.ConfigError, match=rf"args\.{name} = .* is refused: should be {wanted}"):
        setattr(args, name, value)
    setattr(args, name, getattr(vf.GRPOConfig(), name))


@pytest.mark.parametrize(
    ("holder", "name", "said"),
    [
        (
            Model("m", "m"),
            "config",
            r"model\.folder is what training begins with: .*AutoModelForCausalLM\.from_pretrained",
        ),
        (Tokenizer("m", "m"), "pad_token", "has no 'pad_token'; .* Leave out what sets a pad token"),
        (vf.Environment("e"), "get_dataset", "has no 'get_dataset'; 'quartet eval' measures"),
        (object.__new__(vf.GRPOTrainer), "optimizers", r"the trainer makes its own; set args\.optim"),
        (object.__new__(vf.GRPOTrainer), "lr_scheduler", r"docs/python\.md has what there is"),
        (object.__new__(vf.GRPOTrainer).accelerator, "unwrap_model", "the model is in another process"),
    ],
)
def test_what_is_looked_for_in_an_object_is_said_to_be_elsewhere(holder: Any, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(holder, name)
    assert not hasattr(holder, name)


def test_a_run_that_wandb_cannot_show_is_told_in_the_words_of_the_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """grpo_defaults asks for it, and transformers has a project for it: the script may have said neither."""
    args, told = vf.grpo_defaults("r"), logging.getLogger("quartet.grpo")
    lacking = place.Lacking("no API key is found", "run 'wandb login', set WANDB_API_KEY", "set wandb.mode")
    monkeypatch.setattr(place, "lacks", lambda config: lacking)
    assert project_of(args, told) is None
    (said,) = caplog.messages
    assert said.startswith(
        "the run is not shown in Weights & Biases: no API key is found; run 'wandb login', "
    )
    assert said.endswith("or args.report_to = 'none' says that it need not be")
    assert "huggingface" not in said and "wandb.mode" not in said
    monkeypatch.setattr(place, "lacks", lambda config: None)
    assert project_of(args, told) == args.project
