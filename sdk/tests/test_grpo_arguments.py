"""Every argument of verifiers 0.1.3's GRPOConfig and of transformers' TrainingArguments: translated, or
without effect and said to be so. (test_grpo_refusals.py has what is refused.)
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import quartet.grpo as vf
from grpo_script import SCRIPT, at, translated
from quartet.grpo.arguments import GRPO_DEFAULTS
from quartet.grpo.translate import Logging, translate
from quartet.grpo.untranslated import REFUSED, WITHOUT_EFFECT
from quartet.run.algorithm import AlgorithmConfig
from quartet.scripts.models import Model

#: Of a script: those that become keys of a run, and all that are known.
TRANSLATED = tuple(vf.GRPOConfig.__annotations__)
ARGUMENTS = (*TRANSLATED, *vf.GRPOConfig.known())

# verifiers/trainers/grpo_config.py of 0.1.3: every field that it declares, with its default.
OF_VERIFIERS: dict[str, Any] = {
    "model_init_kwargs": None,
    "disable_dropout": False,
    "remove_unused_columns": False,
    "max_prompt_length": 512,
    "num_generations": 8,
    "max_completion_length": None,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "max_tokens": None,
    "max_seq_len": 2048,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_data_workers": 8,
    "max_concurrent": 1024,
    "num_batches_ahead": 1,
    "async_generation_timeout": 600.0,
    "async_max_queue_size": None,
    "vllm_guided_decoding_regex": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 300.0,
    "learning_rate": 1e-6,
    "beta": 0.001,
    "num_iterations": 1,
    "epsilon": 0.2,
    "delta": None,
    "epsilon_high": None,
    "scale_rewards": False,
    "loss_type": "dr_grpo",
    "mask_env_responses": True,
    "mask_truncated_completions": True,
    "zero_truncated_completions": False,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 100,
    "log_completions": False,
    "num_completions_to_print": None,
    "wandb_log_unique_prompts": False,
}


# TrainingArguments of transformers 4.56, new with verifiers 0.1.3: what later ones dropped.
OF_TRANSFORMERS_4 = {
    *("overwrite_output_dir", "per_gpu_train_batch_size", "per_gpu_eval_batch_size", "warmup_ratio"),
    *("logging_dir", "save_safetensors", "no_cuda", "use_mps_device", "jit_mode_eval", "use_ipex"),
    *("fp16_opt_level", "half_precision_backend", "tpu_num_cores", "tpu_metrics_debug", "past_index"),
    *("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "adafactor", "group_by_length"),
    *("use_legacy_prediction_loop", "include_inputs_for_metrics", "fp16_backend"),
    *("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token", "mp_parameters"),
    *("torchdynamo", "ray_scope", "include_tokens_per_second"),
}


# Argument, value, key of the run, what it is then.
KEYS: list[tuple[str, Any, str, Any]] = [
    ("per_device_train_batch_size", 16, "batch_size", 64),
    ("per_device_train_batch_size", 2, "microbatch_tokens", 8192),
    ("gradient_accumulation_steps", 3, "batch_size", 24),
    ("num_processes", 2, "batch_size", 64),
    ("num_processes", 2, "trainer.ranks", 2),
    ("num_generations", 16, "rollouts_per_example", 16),
    ("generation_batch_size", 64, "batch_size", 64),
    ("generation_batch_size", 64, "algorithm.num_minibatches", 2),
    ("steps_per_generation", 8, "algorithm.num_minibatches", 2),
    ("num_iterations", 2, "algorithm.num_iterations", 2),
    ("num_iterations", 2, "max_steps", 250),
    ("num_iterations", 2, "warmup_steps", 5),
    ("max_prompt_length", 100, "inference.max_model_len", 2048),
    ("max_prompt_length", 100, "max_prompt_tokens", 100),
    ("max_prompt_length", None, "max_prompt_tokens", None),
    ("max_completion_length", 99, "inference.max_model_len", 99),
    ("max_completion_length", 99, "algorithm.constant_tokens", 99),
    ("max_seq_len", 1000, "inference.max_model_len", 1000),
    ("max_seq_len", 4096, "inference.max_model_len", 2048),  # the model's own
    ("max_seq_len", 4096, "algorithm.constant_tokens", 4096),
    ("max_tokens", 77, "sampling.max_tokens", 77),
    ("temperature", 0.7, "sampling.temperature", 0.7),
    ("top_p", 0.9, "sampling.top_p", 0.9),
    ("top_k", 50, "sampling.top_k", 50),
    ("top_k", -1, "sampling.top_k", None),
    ("min_p", 0.05, "sampling.min_p", 0.05),
    ("repetition_penalty", 1.1, "sampling.repetition_penalty", 1.1),
    ("presence_penalty", 0.5, "sampling.presence_penalty", 0.5),
    ("frequency_penalty", -0.5, "sampling.frequency_penalty", -0.5),
    ("num_batches_ahead", 0, "max_off_policy_steps", 0),
    ("num_batches_ahead", 3, "max_off_policy_steps", 3),
    ("max_concurrent", 64, "max_concurrent", 64),
    ("loss_type", "grpo", "algorithm.aggregation", "sequence"),
    ("loss_type", "bnpo", "algorithm.aggregation", "token"),
    ("loss_type", "dr_grpo", "algorithm.aggregation", "constant"),
    ("loss_type", "bnpo", "algorithm.constant_tokens", None),
    ("beta", 0.04, "algorithm.kl_coef", 0.04),
    ("beta", 0.0, "algorithm.reference", None),
    ("epsilon", 0.1, "algorithm.clip_low", 0.1),
    ("epsilon", 0.1, "algorithm.clip_high", 0.1),
    ("epsilon_high", 0.28, "algorithm.clip_high", 0.28),
    ("epsilon_high", 0.28, "algorithm.clip_low", 0.2),
    ("delta", 1.5, "algorithm.delta", 1.5),
    ("scale_rewards", True, "algorithm.advantage", "grpo"),
    ("scale_rewards", False, "algorithm.advantage", "dr_grpo"),
    ("scale_rewards", "group", "algorithm.advantage", "grpo"),
    ("scale_rewards", "none", "algorithm.advantage", "dr_grpo"),
    ("mask_truncated_completions", False, "algorithm.overlong_filtering", False),
    ("sync_ref_model", False, "algorithm.reference", None),
    ("ref_model_sync_steps", 9, "algorithm.reference.sync_steps", 9),
    ("ref_model_mixup_alpha", 0.25, "algorithm.reference.mixup_alpha", 0.25),
    ("max_steps", 12, "max_steps", 12),
    ("learning_rate", 3e-4, "learning_rate", 3e-4),
    ("lr_scheduler_type", "linear", "lr_scheduler", "linear"),
    ("lr_scheduler_type", "cosine", "lr_scheduler", "cosine"),
    ("lr_scheduler_type", "constant", "warmup_steps", 0),
    ("warmup_steps", 20, "warmup_steps", 20),
    ("warmup_steps", 0.1, "warmup_steps", 50),
    ("optim", "adamw_torch_fused", "optimizer", "adamw"),
    ("optim", "sgd", "momentum", 0.0),
    ("weight_decay", 0.1, "weight_decay", 0.1),
    ("adam_beta1", 0.8, "adam_beta1", 0.8),
    ("adam_beta2", 0.95, "adam_beta2", 0.95),
    ("adam_epsilon", 1e-6, "adam_epsilon", 1e-6),
    ("max_grad_norm", 0.0, "max_grad_norm", 0.0),
    ("seed", 5, "seed", 5),
    ("eval_strategy", "steps", "eval.interval", 1),  # eval_steps is logging_steps where it is not given
    ("eval_strategy", "no", "eval.num_examples", 0),
    ("eval_on_start", True, "eval.before", True),
    ("save_steps", 50, "ckpt.interval", 50),
    ("save_steps", 50, "ckpt.keep_last", 1000),
    ("save_steps", 0.1, "ckpt.interval", 50),
    ("save_total_limit", 3, "ckpt.keep_last", 3),
    ("save_strategy", "no", "ckpt.interval", 10),
    ("num_completions_to_print", 9, "messages_of_members", 3),
    ("bf16", False, "compute_dtype", "float32"),
    ("bf16", True, "compute_dtype", None),
    ("gradient_checkpointing", False, "trainer.gradient_checkpointing", False),
    ("use_cpu", True, "trainer.device", "cpu"),
    ("no_cuda", True, "trainer.device", "cpu"),
    ("overrides", {"trainer": {"threads": 2}}, "trainer.threads", 2),
    ("overrides", {"sampling": {"stop": ["###"]}}, "sampling.stop", ("###",)),
    ("overrides", {"eval": {"num_examples": 16}}, "eval.num_examples", 16),
]


# Tested below by themselves, or in test_grpo_script.py: no key of a run says them.
ELSEWHERE = {
    *("output_dir", "run_name", "overwrite_output_dir", "async_generation_timeout", "eval_steps"),
    *("warmup_ratio", "lr_scheduler_kwargs", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_completions", "report_to", "project", "activation_checkpointing", "use_liger_kernel"),
}


@pytest.mark.parametrize(("name", "value", "key", "expected"), KEYS, ids=[f"{k[0]}-{k[2]}" for k in KEYS])
def test_an_argument_becomes_its_key(name: str, value: Any, key: str, expected: Any) -> None:
    assert at(translated(**{name: value}), key) == expected


def test_no_argument_is_forgotten() -> None:
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")
    there = {*OF_VERIFIERS, *OF_TRANSFORMERS_4}
    there |= {one.name for one in dataclasses.fields(transformers.TrainingArguments) if one.init}
    assert there - set(ARGUMENTS) == set()
    assert set(ARGUMENTS) - there == {"num_processes", "overrides"}
    assert len(ARGUMENTS) == len(set(ARGUMENTS)), "each has one fate"
    assert set(TRANSLATED) == {name for name, *_ in KEYS} | ELSEWHERE, "each is tested"


def test_every_argument_that_is_called_translated_is_read() -> None:
    read: set[str] = set()

    class Watched(vf.GRPOConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    # Those beside which others are not looked at.
    for given in (
        {},
        {"warmup_steps": 0, "eval_strategy": "steps", "gradient_checkpointing": False},
        {"max_completion_length": 9},
    ):
        args = Watched(**{**GRPO_DEFAULTS, **given})
        translate(args, Model("m", "/m", use_liger=False), [vf.Environment("e")])
    of_the_trainer = {"output_dir", "run_name", "overwrite_output_dir", "project"}
    assert set(TRANSLATED) - read == of_the_trainer, "trainer.py reads these"
    assert "fsdp" in read, "what is without effect is looked at, too"


def test_the_page_has_every_argument() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
    missing = [name for name in ARGUMENTS if f"`{name}`" not in page and f"`args.{name}`" not in page]
    assert missing == []
    whys = {known.why for table in (WITHOUT_EFFECT, REFUSED) for known in table.values()}
    assert [why for why in whys if f"| {why} |" not in page] == []


def test_the_defaults_are_those_of_verifiers() -> None:
    args = vf.GRPOConfig()
    assert {name: getattr(args, name) for name in OF_VERIFIERS} == OF_VERIFIERS
    given = vf.grpo_defaults("my-experiment")
    assert (given.output_dir, given.run_name) == ("outputs/my-experiment", "my-experiment")
    assert {name: getattr(given, name) for name in GRPO_DEFAULTS} == GRPO_DEFAULTS


def test_the_defaults_of_transformers_are_kept() -> None:
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")
    ours = vf.GRPOConfig()
    # verifiers has its own of these; transformers changed the others between its releases.
    other = {
        "output_dir",
        "learning_rate",
        "optim",
        "remove_unused_columns",
        "fsdp",
        "gradient_checkpointing",
    }
    for one in dataclasses.fields(transformers.TrainingArguments):
        if one.init and one.name not in other and one.default is not dataclasses.MISSING:
            value = getattr(ours, one.name)
            # An enum of words; None and False of a switch, which transformers 4 had as False.
            assert (
                value == getattr(one.default, "value", one.default)
                or not (value or one.default)
                or ((one.name, one.default) == ("include_num_input_tokens_seen", "no"))
            ), one.name


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_said_in_one_line(name: str) -> None:
    default = WITHOUT_EFFECT[name].default
    quiet = translated()
    other = "something" if not isinstance(default, bool) else not default
    asked_for = GRPO_DEFAULTS.get(name, default) != other
    loud = translated(**{name: other})
    said = [note for note in loud.notes if note not in quiet.notes]
    assert [f"args.{name} = {other!r} is without effect" in note for note in said] == [True] * asked_for
    assert "\n" not in "".join(said)
    assert loud.config == quiet.config


def test_a_script_that_sets_everything_is_a_run() -> None:
    run = translated(**SCRIPT)
    assert (run.config.batch_size, run.config.rollouts_per_example) == (32, 16)
    assert (run.config.eval.interval, run.config.eval.before, run.config.eval.after) == (100, False, True)
    assert run.config.env[0].timeout_seconds == 300.0
    assert run.logging == Logging(1, completions=5)
    assert [note.split(" = ")[0] for note in run.notes] == [
        "args.ds3_gather_for_generation",
        "args.per_device_eval_batch_size",
        "args.generation_batch_size",
        "args.max_completion_length",
    ]


def test_steps_are_optimizer_steps_and_a_run_counts_batches() -> None:
    run = translated(
        num_iterations=2, generation_batch_size=64, max_steps=30, warmup_steps=4, save_steps=8,
        logging_steps=8, eval_strategy="steps", eval_steps=16,
    )  # fmt: skip
    assert run.steps_per_batch == run.config.versions_per_step == 4
    assert run.config.max_steps == 8 and any("max_steps = 30 is taken as 32" in note for note in run.notes)
    assert (run.config.warmup_steps, run.config.ckpt.interval, run.logging.every) == (1, 2, 2)
    assert (run.config.eval.interval, run.config.eval.after) == (4, True)


def test_a_schedule() -> None:
    assert translated(warmup_steps=0, warmup_ratio=0.03).config.warmup_steps == 15
    assert translated(warmup_ratio=0.03).config.warmup_steps == 10, "steps go before the ratio"
    assert translated(warmup_steps=0, warmup_ratio=1.0).config.warmup_steps == 500, "a share, and no step"
    decay = {"num_decay_steps": 100, "decay_type": "linear"}
    run = translated(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=decay)
    assert (run.config.lr_scheduler, run.config.decay_steps) == ("warmup_stable_decay", 100)
    least = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 4e-6}
    for settings in ({"min_lr": 1e-6}, {"min_lr_rate": 0.25}):
        cosine = translated(**least, lr_scheduler_kwargs=settings).config
        assert (cosine.lr_scheduler, cosine.min_lr) == ("cosine", pytest.approx(1e-6))
    assert translated(**least, lr_scheduler_kwargs={"min_lr": 1e-6}, max_steps=10).config.min_lr == 0.0
    short = translated(max_steps=4, learning_rate=1.0)
    # min(1, (s + 1) / 10) for the four steps that there are.
    assert (short.config.learning_rate, short.config.warmup_steps) == (pytest.approx(0.4), 4)
    assert any("warmup_steps = 10 is more than max_steps" in note for note in short.notes)
    risen = translated(max_steps=10, lr_scheduler_type="cosine").config
    assert (risen.lr_scheduler, risen.warmup_steps) == ("constant", 10)


def test_an_enum_of_transformers_is_its_word() -> None:
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")
    run = translated(
        lr_scheduler_type=transformers.SchedulerType.COSINE, eval_strategy=transformers.IntervalStrategy.NO
    )
    assert run.config.lr_scheduler == "cosine"


def test_lengths() -> None:
    run = translated(max_seq_len=None, max_completion_length=100, max_prompt_length=28)
    assert run.config.algorithm.constant_tokens == 128
    with pytest.raises(vf.ConfigError, match="max_seq_len is not set"):
        translated(max_seq_len=None)


def test_what_is_printed() -> None:
    assert translated(log_completions=False).logging.completions == 0
    assert translated(num_completions_to_print=None).logging.completions == 1
    due = [batch for batch in range(1, 8) if translated(logging_steps=3).logging.due(batch)]
    assert due == [3, 6]
    first = translated(logging_steps=3, logging_first_step=True).logging
    assert [batch for batch in range(1, 8) if first.due(batch)] == [1, 3, 6]
    assert not any(map(translated(logging_strategy="no").logging.due, range(8)))
    assert any("'comet_ml' is without effect" in note for note in translated(report_to=["comet_ml"]).notes)
    for asked in ("tensorboard", ["tensorboard", "none"], "all"):
        assert (
            translated(report_to=asked).config.tensorboard.enabled and not translated(report_to=asked).notes
        )
    assert not translated(report_to="wandb").config.tensorboard.enabled
    assert not translated(report_to="none").notes


@pytest.mark.parametrize("asked", ["wandb", ["wandb"], "all"])
def test_a_run_is_reported_to_weights_and_biases_where_it_can_be(asked: Any) -> None:
    args = vf.grpo_defaults("my run")
    args.report_to = asked
    model, environments = Model("m", "/m"), [vf.Environment("e")]
    wandb = translate(args, model, environments, wandb_project="p").config.wandb
    assert (wandb.project, wandb.name, wandb.completions) == ("p", "my run", 8)
    args.log_completions = False
    assert translate(args, model, environments, wandb_project="p").config.wandb.completions == 0
    assert translate(args, model, environments).config.wandb.project is None
    args.report_to = "none"
    assert translate(args, model, environments, wandb_project="p").config.wandb.project is None


def test_a_run_is_told_to_mlflow_by_the_variables_that_transformers_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    (note,) = translated(report_to="mlflow").notes
    assert "nobody says where" in note and "set the variable MLFLOW_TRACKING_URI" in note
    assert translated(report_to=["mlflow"]).config.mlflow.experiment is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    assert "without effect" in translated(report_to="mlflow").notes[0], "the client alone reads none"
    assert not translated(report_to="all").notes
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://h:5000")
    for asked in ("mlflow", "all"):
        told = translated(report_to=asked, run_name="first", project="p")
        assert (told.config.mlflow.experiment, told.config.mlflow.name) == ("p", "first") and not told.notes
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert translated(report_to="mlflow").config.mlflow.experiment == "mine"


def test_the_trainers_machine() -> None:
    assert "liger" not in translated().config.trainer
    plain = Model("m", "/m", use_liger=False)
    assert translated(model=plain).config.trainer["liger"] == "off"
    assert "liger" not in translated(model=plain, use_liger_kernel=True).config.trainer
    for older, newer in ((False, True), (True, False)):  # the newer name counts
        again = translated(gradient_checkpointing=older, activation_checkpointing=newer)
        assert again.config.trainer["gradient_checkpointing"] is newer


def test_an_adapter_has_the_model_as_its_reference() -> None:
    run = translated(peft_config=vf.lora_defaults(r=4, alpha=8))
    assert run.config.algorithm.reference is None and run.config.algorithm.kl_coef == 0.001
    assert any("sync_ref_model = True is taken as False, as there" in note for note in run.notes)
    lora = run.config.lora
    assert (lora.enabled, lora.r, lora.alpha, lora.publish) == (True, 4, 8.0, "adapter")
    assert lora.target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_pefts_own_adapter_is_read() -> None:
    peft = pytest.importorskip("peft", reason="the services' installation brings it")
    given = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    lora = translated(peft_config=given).config.lora
    assert (lora.r, lora.alpha, lora.dropout, lora.target_modules) == (4, 8.0, 0.1, ())
    assert not any("target_modules" in note for note in translated(peft_config=given).notes)
    whole = translated(peft_config=peft.LoraConfig(r=4, modules_to_save=["lm_head"])).config.lora
    assert (whole.modules_to_save, whole.publish) == (("lm_head",), "merged")
    experts = translated(
        peft_config=peft.LoraConfig(r=4, target_parameters=["experts.down_proj"])
    ).config.lora
    assert (experts.target_parameters, experts.publish) == (("experts.down_proj",), "merged")
    for wrong, sentence in (
        (peft.LoraConfig(use_dora=True), "use_dora = True is refused"),
        (peft.LoraConfig(target_modules=r".*\.q_proj"), "is a pattern; list the names"),
        (peft.PromptTuningConfig(num_virtual_tokens=3), "has no r; only LoRA"),
        ({"r": 4}, "is no LoraConfig"),
    ):
        with pytest.raises(vf.ConfigError, match=sentence):
            translated(peft_config=wrong)


def test_what_scripts_say_of_pefts_at_its_defaults_is_taken() -> None:
    lora = translated(
        peft_config=vf.LoraConfig(r=4, bias="none", use_dora=False, init_lora_weights=True)
    ).config
    assert lora.lora.r == 4
    with pytest.raises(vf.ConfigError, match="peft_config: bias = 'all' is refused"):
        translated(peft_config=vf.LoraConfig(r=4, bias="all"))


def test_modules_that_peft_would_choose_are_said_to_be_others_here() -> None:
    unnamed = translated(peft_config=vf.LoraConfig(r=4))
    assert unnamed.config.lora.target_modules == ()
    (note,) = [note for note in unnamed.notes if "target_modules" in note]
    assert "target_modules = None is every linear module but the head here" in note
    assert not any("target_modules" in note for note in translated(peft_config=vf.lora_defaults()).notes)


def test_a_preset_among_the_overrides_is_that_alone() -> None:
    def algorithm(epsilon: float = 0.3, **said: Any) -> AlgorithmConfig:
        return translated(epsilon=epsilon, overrides={"algorithm": said}).config.algorithm

    cispo = algorithm(preset="cispo")
    assert (cispo.loss, cispo.advantage, cispo.aggregation) == ("cispo", "grpo", "token")
    assert (cispo.clip_high, cispo.proximal, cispo.constant_tokens) == (4.0, False, None)
    assert (cispo.kl_coef, cispo.overlong_filtering) == (0.001, True), "no preset says these"
    assert algorithm(preset="dr_grpo").constant_tokens == 4096, "which it divides by"
    other = algorithm(loss="cispo")
    assert (other.clip_low, other.clip_high, other.advantage) == (None, None, "dr_grpo")
    for same in ({"loss": "ppo"}, {"preset": None}, {"proximal": True}):
        own = algorithm(**same)
        assert (own.loss, own.clip_low, own.proximal, own.constant_tokens) == ("ppo", 0.3, True, 4096)


def test_environments_of_a_run() -> None:
    args = vf.grpo_defaults("r")
    given = [
        vf.Environment("a", {"x": 1}, python="/p/bin/python", weight=3.0, name="easy"),
        vf.Environment("a", {"x": 2}, name="hard"),
    ]
    config = translate(args, Model("m", "/m"), given).config
    assert [(one.label, one.args, one.weight) for one in config.env] == [
        ("easy", {"x": 1}, 3.0),
        ("hard", {"x": 2}, 1.0),
    ]
    assert config.envhost == {"environments": {"a": {"python": "/p/bin/python"}}}
