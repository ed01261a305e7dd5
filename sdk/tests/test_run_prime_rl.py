"""The dialect of prime-rl: what becomes of its keys, its defaults, and what is refused.

Defaults are those of prime-rl 0.8.0, read off prime_rl/configs/{trainer,orchestrator,shared,rl,inference}.py.
"""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from prime_rl_files import CLASSIC, LATER, MACHINES, SOURCES, TASKSETS
from prime_rl_tables import SEVEN, run_of, tables, values
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.dialect import Translation
from quartet.run.hosted import MAX_TIMEOUT_SECONDS
from quartet.run.prime_rl import Form, form_of, translate
from quartet.run.prime_rl.form import AT_THE_TOP, OF_OUR_SERVICES, OF_SERVICES, OURS

#: The run of a file that says nothing more.
DEFAULT_RUN = {
    "batch_size": 128,
    "rollouts_per_example": 8,
    "max_off_policy_steps": 1,
    "at_once": 1024,
    "microbatch_tokens": 2048,
    "learning_rate": 1e-6,
    "lr_scheduler": "constant",
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "sampling.temperature": 1.0,
    "sampling.max_tokens": None,
    "sampling.top_p": None,
    "env.0.id": "reverse-text",
    "env.0.weight": 1.0,
    "env.0.timeout_seconds": MAX_TIMEOUT_SECONDS,
    "algorithm.advantage": "dr_grpo",
    "algorithm.aggregation": "token",
    "algorithm.loss": "custom",
    "algorithm.custom": "prime_rl_dppo",
    "algorithm.custom_args": {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "algorithm.zero_advantage_filtering": True,
    "algorithm.dynamic_sampling": False,
    "algorithm.overlong_filtering": False,
    "algorithm.kl_coef": 0.0,
    "algorithm.num_iterations": 1,
    "lora.enabled": False,
    "trainer.gradient_checkpointing": True,
    "trainer.optimizer_offload": True,
    "eval.num_examples": 0,
    "wandb.project": None,
    "inference.max_model_len": 2048,
}


def test_what_a_file_leaves_out_has_the_default_of_prime_rl() -> None:
    found = translate(tables())
    assert values(validate(RunConfig, found.tables), DEFAULT_RUN) == DEFAULT_RUN
    assert found.without_effect == ()
    assert found.origins["learning_rate",] == "prime-rl's default of trainer.optim.lr"


def test_a_group_of_one_is_its_default_and_refused_with_its_place() -> None:
    given = tables()
    del given["orchestrator"]["group_size"]
    assert translate(given).origins["rollouts_per_example",].startswith("prime-rl's default of")
    with pytest.raises(ConfigError, match=r"rollouts_per_example = 1 is refused: algorithm\.advantage"):
        run_of(given)


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("trainer.optim.lr = 3e-6", {"learning_rate": 3e-6}),
        ('trainer.optim.max_norm = "None"', {"max_grad_norm": 0.0}),
        ("trainer.optim.betas2 = 0.99", {"adam_beta2": 0.99}),
        ('trainer.optim.type = "muon"', {"optimizer": "muon", "momentum": 0.95, "adam_beta2": 0.95}),
        ('trainer.optim = { type = "sgd", nesterov = false, momentum = 0.8 }', {"momentum": 0.8}),
        ('trainer.scheduler.type = "cosine"', {"lr_scheduler": "cosine", "warmup_steps": 10, "min_lr": 0.0}),
        ('trainer.scheduler = { type = "cosine", min_lr = 1e-7 }', {"min_lr": 1e-7}),
        ('trainer.scheduler = { type = "linear", min_lr = 1e-7 }', {"min_lr": 1e-7, "decay_steps": 10}),
        (
            'trainer.scheduler = { type = "linear", warmup_steps = 4 }',
            {"lr_scheduler": "warmup_stable_decay", "warmup_steps": 4, "decay_steps": 10},
        ),
        (
            'trainer.scheduler = { type = "linear", decay_steps = 0 }',
            {"lr_scheduler": "constant", "warmup_steps": 10},
        ),
        (
            "trainer.loss = { kl_tau = 0.0, dppo_mask_high = 0.28 }",
            {"algorithm.loss": "dppo", "algorithm.clip_high": 0.28, "algorithm.clip_low": 0.2},
        ),
        ("trainer.loss.adv_tau = 0.5", {"algorithm.custom_args.adv_tau": 0.5}),
        ('trainer.loss.type = "ipo"', {"algorithm.custom": "prime_rl_ipo", "algorithm.custom_args.eps": 0.1}),
        (
            'trainer.loss.type = "icepop"',
            {"algorithm.loss": "ppo", "algorithm.correction.floor": 0.2, "algorithm.correction.cap": 5.0},
        ),
        ('trainer.loss.type = "cispo"', {"algorithm.loss": "cispo", "algorithm.clip_high": 5.0}),
        ('trainer.loss = { type = "ppo", ratio_high = 1.5 }', {"algorithm.clip_high": 0.5}),
        ("trainer.model.freeze_moe_router = true", {"freeze_routers": True}),
        ("trainer.enable_router_replay = true", {"algorithm.router_replay": True}),
        ("trainer.model.ac = {}", {"trainer.gradient_checkpointing": True}),
        ('trainer.model.ac = "None"', {"trainer.gradient_checkpointing": False}),
        ("trainer.model.optim_cpu_offload = false", {"trainer.optimizer_offload": False}),
        (
            "trainer.model = { full_offload = true, optim_cpu_offload = false }",
            {"trainer.optimizer_offload": True},
        ),
        ("trainer.model.lora = {}", {"lora.r": 16, "lora.alpha": 32.0, "lora.target_modules": SEVEN}),
        (
            'trainer.model.experimental.lora = { rank = 4, modules_to_save = ["lm_head"] }',
            {"lora.r": 4, "lora.publish": "merged", "lora.modules_to_save": ("lm_head",)},
        ),
        ("ckpt.interval = 7", {"ckpt.interval": 7}),
        ("ckpt.keep = 3", {"ckpt.keep_last": 3}),
        ("ckpt.keep_interval = 40", {"ckpt.keep_interval": 40, "ckpt.interval": 10}),
        ("trainer.ckpt = { interval = 25, keep_interval = 100 }", {"ckpt.keep_interval": 100}),
        ('ckpt.keep_interval = "None"', {"ckpt.keep_interval": None}),
        ("orchestrator.batch_size = 64", {"batch_size": 64}),
        ("orchestrator.oversampling_factor = 2.0", {"max_concurrent": 256}),
        ("orchestrator.max_inflight_rollouts = 300", {"max_concurrent": 300}),
        ("orchestrator.max_inflight_groups = 16", {"max_concurrent": 128}),
        ("orchestrator.max_off_policy_steps = 0", {"max_off_policy_steps": 0}),
        ("max_async_level = 2", {"max_off_policy_steps": 2}),
        ("orchestrator.mask_truncated_completions = true", {"algorithm.overlong_filtering": True}),
        ('orchestrator.algo.type = "max_rl"', {"algorithm.advantage": "max_rl"}),
        ('orchestrator.advantage = "None"', {"algorithm.advantage": "none"}),
        ("orchestrator.train.filter_zero_advantages = false", {"algorithm.zero_advantage_filtering": False}),
        (
            'orchestrator.post_batch_filters = [{ type = "zero_advantage", enforce = false }]',
            {"algorithm.zero_advantage_filtering": False, "algorithm.dynamic_sampling": False},
        ),
        ("orchestrator.constant_trainer_batch_size = true", {"algorithm.dynamic_sampling": True}),
        (
            "orchestrator.train.sampling = { top_k = -1, min_p = 0.1, min_tokens = 4 }",
            {"sampling.top_k": 0, "sampling.min_p": 0.1, "sampling.min_tokens": 4},
        ),
        (
            "orchestrator.train.sampling = { extra_body = { stop = '</answer>' } }",
            {"sampling.stop": ("</answer>",)},
        ),
        (
            "orchestrator.train.sampling = { stop = ['a', 'b'] }",
            {"sampling.stop": ("a", "b")},
        ),
        (
            "orchestrator.train.sampling.extra_body.chat_template_kwargs = { enable_thinking = false }",
            {"sampling.template_settings": {"enable_thinking": False}},
        ),
        ("inference.model.max_model_len = 1024", {"inference.max_model_len": 1024}),
        ("inference.model.max_model_len = 9000", {"inference.max_model_len": 2048}),
        ("inference.vllm.max_model_len = 512", {"inference.max_model_len": 512}),
        ('inference.model.dtype = "float32"', {"inference.embedded.dtype": "float32"}),
        ('inference.model.tool_call_parser = "None"', {"inference.chat.tool_parser": "none"}),
        ('tokenizer.chat_template = "t.jinja"', {"inference.chat.template_file": "t.jinja"}),
        ("wandb = {}", {"wandb.project": "prime-rl"}),
        ("deployment = {}", {"inference.max_model_len": 2048}),
        ("trainer.model.debug = {}", {"microbatch_tokens": 2048}),
        ('trainer.model.lora = "None"', {"lora.enabled": False}),
        ('orchestrator.eval = "None"', {"eval.num_examples": 0}),
        ("wandb.offline = true", {"wandb.mode": "offline"}),
        # A file of each service calls its own run otherwise there.
        (
            'trainer.wandb.name = "x-trainer"\norchestrator.wandb.name = "x-orchestrator"',
            {"wandb.project": "prime-rl", "wandb.name": "x-trainer"},
        ),
        (
            "orchestrator.buffer.online_difficulty_filtering = true\n"
            "orchestrator.constant_trainer_batch_size = false",
            {"algorithm.dynamic_sampling": True, "algorithm.max_resample": 1000},
        ),
        ("deployment = { num_train_gpus = 2, num_infer_gpus = 6 }", {"trainer.gpus": 2, "inference.gpus": 6}),
    ],
)
def test_what_becomes_of_a_key(said: str, becomes: dict[str, Any]) -> None:
    assert values(run_of(tables(said)), becomes) == becomes


def test_arguments_of_vllm_reach_the_engine() -> None:
    given = tables("inference.gpu_memory_utilization = 0.8\ndeployment.num_infer_gpus = 4")
    given["inference"] |= {"parallel": {"tp": 2}, "vllm_extra": {"max_num_seqs": 8, "enable_lora": True}}
    run = translate(given, "vllm")
    assert run.tables["inference"] == {
        "engine": "vllm",
        "max_model_len": 2048,
        "gpus": 4,
        "vllm": {"max_num_seqs": 8, "args": {"gpu_memory_utilization": 0.8, "tensor_parallel_size": 2}},
    }
    assert run.without_effect == (
        "inference.vllm_extra.enable_lora = true (the engine has room for the run's adapter)",
    )
    given["inference"]["parallel"]["dp"] = 4
    with pytest.raises(ConfigError, match=r"inference\.parallel\.dp = 4 is refused: deployment\.num_infer"):
        translate(given, "vllm")


def test_a_run_has_an_end() -> None:
    given = tables()
    del given["max_steps"]
    with pytest.raises(ConfigError, match="max_steps = null is refused: a run ends here; set it"):
        translate(given)
    assert "max_steps" not in translate(given, own={"max_steps": 3}).tables


def test_a_loss_or_preset_of_quartets_own_is_that_alone() -> None:
    loss = {"loss": "ppo", "proximal": True, "correction": {"mode": "mask", "floor": 0.125, "cap": 8.0}}
    run = translate(tables(), own={"algorithm": loss})
    assert run.tables["algorithm"] == {
        "aggregation": "token",
        "advantage": "dr_grpo",
        "zero_advantage_filtering": True,
    }
    assert translate(tables(), own={"algorithm": {"preset": "opd"}}).tables["algorithm"] == {}


@pytest.mark.parametrize("text", [CLASSIC, TASKSETS, SOURCES, LATER, MACHINES])
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_files_of_every_release_are_runs(text: str, engine: Any) -> None:
    given = tomllib.loads(text)
    before = copy.deepcopy(given)
    assert form_of(given)[0] is Form.THEIRS
    found: Translation = translate(given, engine)
    validate(RunConfig, found.tables)
    assert given == before


def test_no_key_of_a_run_is_taken_for_one_of_prime_rl() -> None:
    """What tells the forms apart is in one of them alone."""
    assert not OURS & AT_THE_TOP
    for service, keys in OF_SERVICES.items():
        assert not OF_OUR_SERVICES[service] & keys
