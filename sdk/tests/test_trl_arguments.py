"""Every argument of TRL 1.16's GRPOConfig: translated, or without effect and said to be so.
(test_trl_refusals.py has what is refused; tests/contract/test_trl_arguments.py compares with TRL itself,
tests/contract/test_trl_loss.py what is computed.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpo_script import at
from quartet.grpo.translate import ALL_EXAMPLES, Logging
from quartet.scripts.models import Model
from quartet.trl import GRPOConfig, LoraConfig
from quartet.trl.translate import Data, translate
from quartet.trl.untranslated import REFUSED, WITHOUT_EFFECT
from trl_script import ADDRESS, translated

#: Those that become keys of a run.
TRANSLATED = tuple(GRPOConfig.__annotations__)
CORRECTED = {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}

# Arguments, of which the first is what it is about; key of the run; what it is then.
KEYS: list[tuple[dict[str, Any], str, Any]] = [
    ({"per_device_train_batch_size": 16}, "batch_size", 16),
    ({"per_device_train_batch_size": 16}, "microbatch_tokens", 16384),
    ({"gradient_accumulation_steps": 4}, "batch_size", 32),
    ({"num_processes": 2}, "batch_size", 16),
    ({"num_processes": 2}, "trainer.ranks", 2),
    ({"num_generations": 4}, "rollouts_per_example", 4),
    ({"generation_batch_size": 32}, "batch_size", 32),
    ({"generation_batch_size": 32}, "algorithm.num_minibatches", 4),
    ({"steps_per_generation": 4}, "algorithm.num_minibatches", 4),
    ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "batch_size", 32),
    ({"num_iterations": 2}, "algorithm.num_iterations", 2),
    ({"max_completion_length": 99}, "sampling.max_tokens", 99),
    ({"max_completion_length": None}, "sampling.max_tokens", None),
    ({"max_completion_length": None}, "microbatch_tokens", 0),
    ({"temperature": 0.7}, "sampling.temperature", 0.7),
    ({"top_p": 0.9}, "sampling.top_p", 0.9),
    ({"top_k": 50}, "sampling.top_k", 50),
    ({"top_k": 0}, "sampling.top_k", None),
    ({"top_k": None}, "sampling.top_k", None),
    ({"min_p": 0.05}, "sampling.min_p", 0.05),
    ({"repetition_penalty": 1.1}, "sampling.repetition_penalty", 1.1),
    ({"generation_kwargs": {"stop_strings": "###"}}, "sampling.stop", ("###",)),
    ({"generation_kwargs": {"stop": ["a", "b"]}}, "sampling.stop", ("a", "b")),
    ({"generation_kwargs": {"min_new_tokens": 3}}, "sampling.min_tokens", 3),
    ({"generation_kwargs": {"temperature": 0.5, "do_sample": True}}, "sampling.temperature", 0.5),
    ({"generation_kwargs": {"top_k": -1}, "top_k": 50}, "sampling.top_k", 0),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "sampling.template_settings.enable_thinking",
        False,
    ),
    ({"rollout_timeout": 60.0}, "env.0.timeout_seconds", 60.0),
    ({"use_vllm": True}, "inference.engine", "vllm"),
    ({"use_vllm": True}, "inference.vllm.args", {"gpu_memory_utilization": 0.3}),
    (
        {"vllm_gpu_memory_utilization": 0.5, "use_vllm": True},
        "inference.vllm.args.gpu_memory_utilization",
        0.5,
    ),
    ({"vllm_tensor_parallel_size": 2, "use_vllm": True}, "inference.vllm.args.tensor_parallel_size", 2),
    ({"vllm_model_impl": "transformers", "use_vllm": True}, "inference.vllm.args.model_impl", "transformers"),
    ({"vllm_max_model_length": 1000, "use_vllm": True}, "inference.max_model_len", 1000),
    ({"vllm_max_model_length": 9000, "use_vllm": True}, "inference.max_model_len", 2048),  # the model's own
    ({"vllm_mode": "server", "use_vllm": True}, "inference", {"engine": "vllm"}),
    ({"vllm_importance_sampling_correction": True, "use_vllm": True}, "algorithm.correction.cap", 3.0),
    ({"vllm_importance_sampling_correction": False, "use_vllm": True}, "algorithm.correction", None),
    (
        {"vllm_importance_sampling_mode": "token_truncate", "use_vllm": True},
        "algorithm.correction.mode",
        "truncate",
    ),
    (
        {"vllm_importance_sampling_mode": "sequence_mask", "use_vllm": True},
        "algorithm.correction.level",
        "sequence",
    ),
    ({"vllm_importance_sampling_clip_max": 2.0, **CORRECTED}, "algorithm.correction.cap", 2.0),
    ({"vllm_importance_sampling_clip_max": None, **CORRECTED}, "algorithm.correction.cap", 1e9),
    ({"vllm_importance_sampling_cap": 5.0, **CORRECTED}, "algorithm.correction.cap", 5.0),
    ({"vllm_importance_sampling_clip_min": 0.5, **CORRECTED}, "algorithm.correction.floor", 0.5),
    ({"scale_rewards": True}, "algorithm.advantage", "grpo"),
    ({"scale_rewards": "none"}, "algorithm.advantage", "dr_grpo"),
    ({"loss_type": "dapo"}, "algorithm.aggregation", "token"),
    ({"loss_type": "dapo"}, "algorithm.loss", "ppo"),
    ({"loss_type": "dr_grpo"}, "algorithm.constant_tokens", 512),
    ({"loss_type": "luspo"}, "algorithm.constant_tokens", 1),
    ({"importance_sampling_level": "sequence"}, "algorithm.ratio_level", "sequence"),
    ({"epsilon": 0.1}, "algorithm.clip_low", 0.1),
    ({"epsilon": 0.1}, "algorithm.clip_high", 0.1),
    ({"epsilon_high": 0.28}, "algorithm.clip_high", 0.28),
    ({"epsilon_high": 5.0, "loss_type": "cispo"}, "algorithm.clip_high", 5.0),
    ({"delta": 1.5}, "algorithm.delta", 1.5),
    ({"sapo_temperature_pos": 2.0, "loss_type": "sapo"}, "algorithm.tau_positive", 2.0),
    ({"sapo_temperature_neg": 2.0, "loss_type": "sapo"}, "algorithm.tau_negative", 2.0),
    ({"vespo_k_pos": 1.5, "loss_type": "vespo"}, "algorithm.kernel.k_positive", 1.5),
    ({"vespo_lambda_pos": 1.5, "loss_type": "vespo"}, "algorithm.kernel.lambda_positive", 1.5),
    ({"vespo_k_neg": 1.5, "loss_type": "vespo"}, "algorithm.kernel.k_negative", 1.5),
    ({"vespo_lambda_neg": 1.5, "loss_type": "vespo"}, "algorithm.kernel.lambda_negative", 1.5),
    ({"beta": 0.04}, "algorithm.kl_coef", 0.04),
    ({"use_bias_correction_kl": False, "beta": 0.04}, "algorithm.kl_weighted", False),
    ({"use_bias_correction_kl": True, "beta": 0.04}, "algorithm.kl_weighted", True),
    ({"sync_ref_model": True, "beta": 0.04}, "algorithm.reference.sync_steps", 512),
    ({"ref_model_sync_steps": 9, "sync_ref_model": True, "beta": 0.04}, "algorithm.reference.sync_steps", 9),
    (
        {"ref_model_mixup_alpha": 0.3, "sync_ref_model": True, "beta": 0.04},
        "algorithm.reference.mixup_alpha",
        0.3,
    ),
    ({"mask_truncated_completions": True}, "algorithm.overlong_filtering", True),
    ({"off_policy_mask_threshold": 0.5}, "algorithm.off_policy_mask", 0.5),
    ({"top_entropy_quantile": 0.2}, "algorithm.top_entropy_quantile", 0.2),
    ({"entropy_coef": 0.01}, "algorithm.entropy_coef", 0.01),
    ({"use_adaptive_entropy": True}, "algorithm.target_entropy", 0.2),
    ({"entropy_target": 1.5, "use_adaptive_entropy": True}, "algorithm.target_entropy", 1.5),
    ({"entropy_coef_delta": 0.01, "use_adaptive_entropy": True}, "algorithm.entropy_coef_delta", 0.01),
    ({"router_aux_loss_coef": 0.0}, "algorithm.loss", "ppo"),
    ({"num_train_epochs": 2.0}, "max_steps", 200),
    ({"max_steps": 12}, "max_steps", 12),
    ({"learning_rate": 3e-4}, "learning_rate", 3e-4),
    ({"lr_scheduler_type": "cosine"}, "lr_scheduler", "cosine"),
    ({"lr_scheduler_kwargs": {"min_lr": 1e-8}, "lr_scheduler_type": "cosine_with_min_lr"}, "min_lr", 1e-8),
    ({"warmup_steps": 20}, "warmup_steps", 20),
    ({"warmup_ratio": 0.1}, "warmup_steps", 30),
    ({"optim": "sgd"}, "optimizer", "sgd"),
    ({"weight_decay": 0.1}, "weight_decay", 0.1),
    ({"adam_beta1": 0.8}, "adam_beta1", 0.8),
    ({"adam_beta2": 0.95}, "adam_beta2", 0.95),
    ({"adam_epsilon": 1e-6}, "adam_epsilon", 1e-6),
    ({"max_grad_norm": 0.1}, "max_grad_norm", 0.1),
    ({"seed": 5}, "seed", 5),
    ({"eval_strategy": "no"}, "eval.num_examples", 0),
    ({"eval_strategy": "steps"}, "eval.num_examples", ALL_EXAMPLES),
    ({"eval_strategy": "steps"}, "eval.interval", 10),  # eval_steps is logging_steps where it is not given
    ({"eval_strategy": "epoch"}, "eval.interval", 100),
    ({"eval_steps": 25, "eval_strategy": "steps"}, "eval.interval", 25),
    ({"eval_on_start": True}, "eval.before", True),
    ({"num_generations_eval": 2, "eval_on_start": True}, "eval.rollouts_per_example", 2),
    ({"num_generations": 4, "eval_on_start": True}, "eval.rollouts_per_example", 4),
    ({"save_steps": 50}, "ckpt.interval", 50),
    ({"save_strategy": "epoch"}, "ckpt.interval", 100),
    ({"save_strategy": "no"}, "ckpt.interval", 10),
    ({"save_total_limit": 3}, "ckpt.keep_last", 3),
    ({"num_completions_to_print": 9, "log_completions": True}, "messages_of_members", 8),
    ({"log_completions": True, "per_device_train_batch_size": 32}, "messages_of_members", 8),
    ({"bf16": False}, "compute_dtype", "float32"),
    ({"bf16": True}, "compute_dtype", None),
    ({"gradient_checkpointing": False}, "trainer.gradient_checkpointing", False),
    (
        {"activation_checkpointing": True, "gradient_checkpointing": False},
        "trainer.gradient_checkpointing",
        True,
    ),
    ({"use_cpu": True}, "trainer.device", "cpu"),
    ({"overrides": {"trainer": {"threads": 2}}}, "trainer.threads", 2),
    ({"overrides": {"max_off_policy_steps": 1}}, "max_off_policy_steps", 1),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "compute_dtype", None),
]

# Tested below by themselves, or in test_trl_trainer.py, test_trl_served.py: no key of a run says them.
ELSEWHERE = {
    *("output_dir", "run_name", "overwrite_output_dir", "reward_weights", "multi_objective_aggregation"),
    *("logging_strategy", "logging_steps", "logging_first_step", "report_to", "project"),
    *("entropy_coef_min", "entropy_coef_max", "max_tool_calling_iterations"),
}


@pytest.mark.parametrize(("given", "key", "expected"), KEYS, ids=[f"{next(iter(k[0]))}-{k[1]}" for k in KEYS])
def test_an_argument_becomes_its_key(given: dict[str, Any], key: str, expected: Any) -> None:
    run = translated(**given)
    if key.startswith("env.0."):
        assert getattr(run.config.env[0], key.removeprefix("env.0.")) == expected
    else:
        assert at(run, key) == expected


def test_every_one_is_tested_and_read() -> None:
    tested = {name for given, *_ in KEYS for name in given}
    assert set(TRANSLATED) == tested | ELSEWHERE
    read: set[str] = set()

    class Watched(GRPOConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    for given in (
        {"use_vllm": True, "gradient_checkpointing": False},
        {"use_adaptive_entropy": True, "eval_strategy": "steps", "log_completions": True, "max_steps": 5},
        {"beta": 0.1, "sync_ref_model": True},
        {"loss_type": "vespo"},
        {"loss_type": "sapo"},
    ):
        translate(Watched(**given), Model("m", "/m"), Data(100, 1, ADDRESS))
    # trainer.py reads these.
    assert set(TRANSLATED) - read == {
        *("output_dir", "run_name", "overwrite_output_dir", "project", "reward_weights"),
    }
    assert "fsdp" in read, "what is without effect is looked at, too"


def test_the_page_has_every_argument() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/trl.md").read_text()
    assert [name for name in GRPOConfig.names() if f"`{name}`" not in page] == []
    whys = {known.why for table in (WITHOUT_EFFECT, REFUSED) for known in table.values()}
    assert [why for why in whys if f"| {why} |" not in page] == []


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_said_in_one_line(name: str) -> None:
    default = WITHOUT_EFFECT[name].default
    other = "something" if not isinstance(default, bool) else not default
    loud, quiet = translated(**{name: other}), translated()
    assert quiet.notes == (), "of what nobody asked for nothing is said"
    (said,) = loud.notes
    assert said.startswith(f"args.{name} = {other!r} is without effect: ") and "\n" not in said
    assert loud.config == quiet.config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm_tensor_parallel_size": 2}, "args.vllm_tensor_parallel_size = 2 is without effect, as in TRL"),
        ({"max_tool_calling_iterations": 3}, "is without effect, as in TRL: tools alone read it"),
        ({"delta": 1.5, "loss_type": "sapo"}, "args.delta = 1.5 is without effect, as in TRL"),
        ({"sapo_temperature_pos": 2.0}, "loss_type = 'sapo' alone reads it"),
        ({"vespo_k_neg": 2.0}, "loss_type = 'vespo' alone reads it"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "takes the ratio of whole completions",
        ),
        ({"loss_type": "vespo", "use_vllm": True}, "its ratio is that to the sampler"),
        ({"use_vllm": True, "vllm_mode": "server"}, "train() starts the engine"),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "weighs the divergence of each token"),
        (
            {"model_init_kwargs": {"dtype": "auto"}},
            "args.model_init_kwargs: dtype = 'auto' is without effect",
        ),
        ({"model_init_kwargs": {"trust_remote_code": False}}, "is without effect: the trainer places"),
        ({"model_init_kwargs": {"revision": "main"}}, "revision = 'main' is without effect"),
        ({"num_iterations": 2, "max_steps": 5}, "args.max_steps = 5 is taken as 6"),
        ({"num_iterations": 2, "num_train_epochs": 0.505}, "comes to 101 steps, which are taken as 102"),
        ({"report_to": "comet_ml"}, "'comet_ml' is without effect"),
    ],
)
def test_what_is_said(given: dict[str, Any], said: str) -> None:
    assert [said in note for note in translated(**given).notes] == [True]


def test_a_run_with_nothing_said_is_trls() -> None:
    run = translated()
    config = run.config
    assert (config.batch_size, config.rollouts_per_example, config.max_steps) == (8, 8, 300)
    assert (run.steps_per_batch, run.steps_of_epoch) == (1, 100)
    assert config.max_off_policy_steps == 0, "the policy that has learned samples the next"
    (env,) = config.env
    assert (env.id, env.args, env.timeout_seconds) == ("reward-service", {"address": ADDRESS}, 600.0)
    algorithm = config.algorithm
    assert (algorithm.loss, algorithm.aggregation, algorithm.proximal) == ("ppo", "token", True)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.2, 0.2, 0.0)
    assert not algorithm.needs_reference and algorithm.correction is None
    assert (config.eval.num_examples, config.eval.before, config.eval.after) == (0, False, False)


def test_what_is_printed() -> None:
    assert translated().logging == Logging(10)
    assert translated(logging_steps=0.1, num_train_epochs=1.0).logging.every == 10
    assert translated(logging_strategy="epoch").logging.every == 100
    assert translated(logging_first_step=True).logging.first
    assert translated(logging_strategy="no").logging == Logging(0)
    every = {"log_completions": True, "per_device_train_batch_size": 32}
    assert translated(**every).logging.completions == 32
    assert translated(**every, num_completions_to_print=2).logging.completions == 2
    assert translated(**every, num_completions_to_print=200).logging.completions == 32
    assert translated(report_to="tensorboard").config.tensorboard.enabled


def test_it_is_reported_to_weights_and_biases_where_it_can_be() -> None:
    args = GRPOConfig(report_to="wandb", run_name="mine")
    given = (args, Model("m", "/m"), Data(100, 0, ADDRESS))
    wandb = translate(*given, wandb_project="p").config.wandb
    assert (wandb.project, wandb.name, wandb.completions) == ("p", "mine", 0)
    args.log_completions = True
    assert translate(*given, wandb_project="p").config.wandb.completions > 0
    assert translate(*given).config.wandb.project is None


def test_the_last_step_is_measured_as_transformers_does() -> None:
    run = translated(eval_strategy="steps", eval_steps=10, max_steps=55).config.eval
    assert (run.interval, run.before, run.after) == (10, False, True)


def test_an_adapter() -> None:
    lora = translated(peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), beta=0.1).config
    assert (lora.lora.enabled, lora.lora.r, lora.algorithm.reference) == (True, 4, None)


def test_rewards_that_are_normalised_apart() -> None:
    """By the weights of the functions, but for those of a metric."""
    given = {"multi_objective_aggregation": "normalize_then_sum", "weights": {"a": 1.0, "b": 0.2, "c": 0.0}}
    run = translated(**given)
    assert (run.config.algorithm.advantage, run.config.algorithm.reward_weights) == ("gdpo", {"b": 0.2})
    assert not any("scale_rewards" in note for note in run.notes)
    unread = "args.scale_rewards = 'none' is without effect, as in TRL"
    assert any(unread in note for note in translated(scale_rewards="none", **given).notes)
    assert translated(weights={"b": 0.2}).config.algorithm.reward_weights == {}, "in the sum they are already"


def test_a_preset_among_the_overrides_is_that_alone() -> None:
    def algorithm(**said: Any) -> Any:
        return translated(epsilon=0.3, overrides={"algorithm": said}).config.algorithm

    rloo = algorithm(preset="rloo")
    assert (rloo.advantage, rloo.loss, rloo.clip_low) == ("rloo", "cispo", None)
    assert algorithm(advantage="reinforce_pp").clip_low == 0.3


def test_fewer_prompts_than_a_batch_are_enough_where_steps_are_counted() -> None:
    run = translate(
        GRPOConfig(max_steps=4, per_device_train_batch_size=64), Model("m", "/m"), Data(3, 0, ADDRESS)
    )
    assert (run.config.max_steps, run.steps_of_epoch) == (4, 1)


@pytest.mark.parametrize("value", [None, 0, 1023])
def test_with_tools_their_limit_changes_nothing_of_the_run(value: int | None) -> None:
    found = translated(max_tool_calling_iterations=value, has_tools=True)
    assert found.notes == () and found.config == translated().config
