"""The dialect of vf-rl: every key of its RLConfig, every default, and what values are refused.

rl_config.json holds the names and defaults of RLConfig, read off verifiers/rl/trainer/config.py of
0.1.9.post3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.vf_rl import translate
from quartet.run.vf_rl.keys import DEFAULTS, INHERITED, WITHOUT_EFFECT
from read_or_refused import is_read_or_refused
from vf_rl_tables import run_of, tables, value_at

RL_CONFIG = json.loads(Path(__file__).with_name("rl_config.json").read_text())
UNREAD = object()
SCALAR = st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5)
ANY = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
KEYS = sorted({*DEFAULTS, *INHERITED, *WITHOUT_EFFECT, "no_such_key"})
VLLM = ["tensor_parallel_size", "max_model_len", "dtype", "chat_template", "host", "enforce_eager"]


def refused(sentence: str) -> Any:
    """What a value is refused with."""
    return ConfigError(sentence)


#: For each key of RLConfig a value that is not the default, and what becomes of it: values of the run by
#: their dotted keys, UNREAD, or a refusal.
BECOMES: dict[str, tuple[Any, Any]] = {
    "use_liger": (False, {"trainer.liger": "off"}),
    "use_lora": (False, {"lora.enabled": False}),
    "lora_rank": (4, {"lora.r": 4}),
    "lora_alpha": (64, {"lora.alpha": 64.0}),
    "lora_dropout": (0.1, {"lora.dropout": 0.1}),
    "lora_target_modules": (["q_proj"], {"lora.target_modules": ("q_proj",)}),
    "lora_modules_to_save": (["lm_head"], {"lora.modules_to_save": ("lm_head",)}),
    "lora_use_rslora": (True, {"lora.use_rslora": True}),
    "lora_config": ({"r": 4}, refused("give lora_rank")),
    "rollouts_per_example": (8, {"rollouts_per_example": 8}),
    "batch_size": (64, {"batch_size": 64}),
    "micro_batch_size": (2, {"microbatch_tokens": 2 * 2048}),
    "max_seq_len": (1024, {"microbatch_tokens": 8 * 1024, "sampling.max_tokens": 1024}),
    "max_prompt_len": (256, {"max_prompt_tokens": 256}),
    "max_steps": (7, {"max_steps": 7}),
    "max_concurrent": (64, {"max_concurrent": 64}),
    "learning_rate": (3e-6, {"learning_rate": 3e-6}),
    "adam_beta1": (0.8, {"adam_beta1": 0.8}),
    "adam_beta2": (0.99, {"adam_beta2": 0.99}),
    "weight_decay": (0.1, {"weight_decay": 0.1}),
    "mask_ratio_low": (0.25, {"algorithm.correction.floor": 0.25}),
    "mask_ratio_high": (4.0, {"algorithm.correction.cap": 4.0}),
    "mask_env_responses": (False, refused("tokens of environments are never learned here")),
    "mask_truncated_completions": (True, {"algorithm.overlong_filtering": True}),
    "zero_truncated_completions": (True, refused("let the environment reward it so")),
    "max_tokens": (100, {"sampling.max_tokens": 100}),
    "temperature": (0.7, {"sampling.temperature": 0.7}),
    "top_p": (0.9, {"sampling.top_p": 0.9}),
    "top_k": (20, {"sampling.top_k": 20}),
    "min_p": (0.05, {"sampling.min_p": 0.05}),
    "repetition_penalty": (1.1, {"sampling.repetition_penalty": 1.1}),
    "presence_penalty": (0.5, {"sampling.presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"sampling.frequency_penalty": 0.5}),
    "generation_timeout": (60.0, {"env.0.timeout_seconds": 60.0}),
    "vllm_server_host": ("10.0.0.1", UNREAD),
    "vllm_server_port": (9000, UNREAD),
    "vllm_server_timeout": (10.0, UNREAD),
    "output_dir": ("outputs/mine", {}),
    "run_name": ("mine", {}),
    "lr_scheduler_type": ("cosine", {"lr_scheduler": "cosine"}),
    "bf16": (False, {"compute_dtype": "float32"}),
    "max_grad_norm": (0.1, {"max_grad_norm": 0.1}),
    "gradient_checkpointing": (True, {"trainer.gradient_checkpointing": True}),
    "save_strategy": ("no", {"ckpt.interval": 500}),
    "save_steps": (20, {"ckpt.interval": 20}),
    "eval_strategy": ("steps", {"eval.interval": 50, "eval.before": False, "eval.after": True}),
    "eval_steps": (20, UNREAD),
    "save_only_model": (False, UNREAD),
    "logging_steps": (10, UNREAD),
    "log_on_each_node": (True, UNREAD),
    "report_to": ("tensorboard", {"tensorboard.enabled": True}),
    "remove_unused_columns": (True, UNREAD),
    "shuffle_dataset": (False, refused("tasks come in a new order in each epoch")),
}


#: The run of a file that says nothing: RLTrainer's algorithm with its defaults.
DEFAULT_RUN = {
    "max_steps": 500,
    "batch_size": 512,
    "rollouts_per_example": 16,
    "max_concurrent": 1024,
    "max_off_policy_steps": 1,
    "microbatch_tokens": 8 * 2048,
    "seed": 42,
    "learning_rate": 1e-5,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "optimizer": "adamw",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "compute_dtype": None,
    "sampling.max_tokens": 2048,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": None,
    "sampling.min_p": 0.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.presence_penalty": 0.0,
    "sampling.frequency_penalty": 0.0,
    "algorithm.advantage": "dr_grpo",
    "algorithm.loss": "ppo",
    "algorithm.aggregation": "token",
    "algorithm.proximal": True,
    "algorithm.correction.mode": "mask",
    "algorithm.correction.level": "token",
    "algorithm.correction.floor": 0.125,
    "algorithm.correction.cap": 8.0,
    "algorithm.overlong_filtering": False,
    "algorithm.kl_coef": 0.0,
    "algorithm.num_iterations": 1,
    "algorithm.num_minibatches": 1,
    "lora.enabled": True,
    "lora.r": 8,
    "lora.alpha": 32.0,
    "lora.dropout": 0.0,
    "lora.use_rslora": False,
    "lora.modules_to_save": (),
    "lora.target_modules": ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj"),
    "lora.publish": "merged",
    "env.0.timeout_seconds": 600.0,
    "ckpt.interval": 50,
    "eval.num_examples": 0,
    "trainer.liger": "auto",
    "trainer.gradient_checkpointing": False,
    "inference.engine": "embedded",
}


def test_the_keys_and_defaults_are_those_of_rl_config() -> None:
    assert dict(DEFAULTS) == RL_CONFIG
    assert set(BECOMES) == set(RL_CONFIG), "each has its case below"
    assert not set(DEFAULTS) & set(INHERITED)


def test_what_a_file_leaves_out_is_as_it_is_there() -> None:
    config = run_of(tables())
    assert {path: value_at(config, path) for path in DEFAULT_RUN} == DEFAULT_RUN


@pytest.mark.parametrize("key", BECOMES)
def test_every_key_becomes_something(key: str) -> None:
    value, expected = BECOMES[key]
    given = tables(**{key: value})
    assert value != RL_CONFIG[key], "a value that could be told from the default"
    if isinstance(expected, ConfigError):
        with pytest.raises(ConfigError, match=str(expected)) as caught:
            translate(given)
        assert str(caught.value).startswith(f"trainer.args.{key} = ")
        return
    run = translate(given)
    config = validate(RunConfig, run.tables)
    told = [line for line in run.without_effect if line.startswith(f"trainer.args.{key} = ")]
    if expected is UNREAD:
        assert told and told[0].endswith(")")
        assert config == run_of(tables()), "and has none"
        return
    assert told == []
    assert {path: value_at(config, path) for path in expected} == expected
    assert (run.run_name, run.output_dir) == (
        value if key == "run_name" else None,
        value if key == "output_dir" else None,
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"top_k": -1}, {"sampling.top_k": 0}),
        ({"lora_target_modules": "all-linear"}, {"lora.target_modules": ()}),
        ({"adam_epsilon": 1e-6}, {"adam_epsilon": 1e-6}),
        ({"lr_scheduler_type": "linear", "warmup_steps": 10}, {"lr_scheduler": "linear", "warmup_steps": 10}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, {"warmup_steps": 50}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 1.0}, {"warmup_steps": 500}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"warmup_steps": 0}),
        ({"max_steps": 130, "save_steps": 0.1}, {"ckpt.interval": 13}),
        ({"eval_strategy": "steps", "eval_steps": 30}, {"eval.interval": 30, "eval.after": False}),
        ({"eval_strategy": "steps", "eval_on_start": True}, {"eval.before": True}),
        ({"optim": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}),
        ({"save_total_limit": 5}, {"ckpt.keep_last": 5}),
        ({"seed": 7}, {"seed": 7}),
        ({"max-steps": 3}, {"max_steps": 3}),
    ],
)
def test_what_transformers_means_by_it(args: dict[str, Any], expected: dict[str, Any]) -> None:
    config = run_of(tables(**args))
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"mask_ratio_hihg": 4.0}, "mask_ratio_hihg = 4.0 is refused: did you mean 'mask_ratio_high'?"),
        ({"torch_compile": True}, "torch_compile = true is refused: Quartet has no such setting"),
        ({"num_generations": 8}, "num_generations = 8 is refused: write rollouts_per_example"),
        ({"beta": 0.1}, "beta = 0.1 is refused: write kl_coef in a table [algorithm]"),
        ({"loss_type": "dr_grpo"}, 'loss_type = "dr_grpo" is refused: write preset in a table [algorithm]'),
        ({"log_completions": True}, "log_completions = true is refused: completions are printed"),
        ({"lr_scheduler_type": "polynomial"}, "choose constant, constant_with_warmup, linear, cosine"),
        ({"save_strategy": "epoch"}, 'trainer.args.save_strategy = "epoch" is refused: choose "steps"'),
        ({"eval_strategy": "epoch"}, 'trainer.args.eval_strategy = "epoch" is refused: choose "steps"'),
        ({"lora_target_modules": ".*proj"}, 'write a list of names, or "all-linear"'),
        ({"optim": "lion_8bit"}, 'choose "adamw_torch" or "sgd"'),
        ({"fp16": True}, "trainer.args.fp16 = true is refused"),
        ({"lr_scheduler_type": ["a"]}, "lr_scheduler_type"),
        ({"max_steps": 10**400, "save_steps": 0.5}, "should be a whole number from 1 on"),
        ({"deepspeed": "zero3.json"}, "set gpus of"),
        ({"micro_batch_size": 2.5}, "micro_batch_size = 2.5 is refused: should be a whole number"),
        ({"use_lora": "no"}, 'trainer.args.use_lora = "no" is refused: should be true or false'),
        ({"report_to": 3}, 'trainer.args.report_to = 3 is refused: should be "wandb", "tens'),
        ({"run_name": 3}, "trainer.args.run_name = 3 is refused: should be text"),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 20}, "should be a part of max_steps, from 0 to 1"),
        ({"save_steps": 0}, "trainer.args.save_steps = 0 is refused: should be a number of steps"),
        ({"save_steps": 50.5}, "trainer.args.save_steps = 50.5 is refused: should be a number of steps"),
        ({"max_tokens": 0}, "trainer.args.max_tokens = 0 is refused: should be a whole number from 1"),
    ],
)  # fmt: skip
def test_refusals(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(tables(**args))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@drawn(
    st.dictionaries(st.sampled_from(KEYS), ANY, max_size=3),
    st.dictionaries(st.sampled_from(VLLM), ANY, max_size=3),
    st.sampled_from(["env", "inference", "trainer", None]),
    ANY,
    st.sampled_from(["vllm", "embedded"]),
)
def test_whatever_a_file_says_is_read_or_refused_in_a_sentence(
    args: dict[str, Any], of_vllm: dict[str, Any], instead: str | None, other: Any, engine: Any
) -> None:
    given = tables(**args)
    given["inference"]["args"] = of_vllm
    if instead is not None:
        given[instead] = other
    is_read_or_refused(translate, given, engine)
