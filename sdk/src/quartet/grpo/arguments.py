"""The arguments of a GRPOTrainer script: those of verifiers 0.1.3's GRPOConfig, with its defaults, and of the
TrainingArguments of transformers under it.

1. Those that this class declares are translated (translate.py), those of untranslated.py are known, and how
   they are set is quartet.scripts.argument_list's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.grpo import untranslated
from quartet.grpo.of_trl import CONFIG
from quartet.scripts.adapter import LoraConfig
from quartet.scripts.argument_list import ArgumentList


class GRPOConfig(ArgumentList):
    """What to train, by the names of verifiers. `overrides` and `num_processes` are Quartet's own."""

    WITHOUT_EFFECT = untranslated.WITHOUT_EFFECT
    REFUSED = untranslated.REFUSED
    ELSEWHERE = CONFIG

    # --- where
    output_dir: str = "trainer_output"
    run_name: str | None = None
    #: Delete what output_dir holds of an earlier run.
    overwrite_output_dir: bool = False

    # --- batches: rollouts of a step = per device * accumulation * processes
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    #: Ranks of the trainer; what `accelerate launch --num-processes` said.
    num_processes: int = 1
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1

    # --- lengths, in tokens
    max_prompt_length: int | None = 512
    max_completion_length: int | None = None
    max_seq_len: int | None = 2048
    max_tokens: int | None = None

    # --- sampling
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    # --- generation beside training
    num_batches_ahead: int = 1
    async_generation_timeout: float = 600.0
    max_concurrent: int = 1024

    # --- loss
    loss_type: str = "dr_grpo"
    beta: float = 0.001
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    scale_rewards: bool | str = False
    mask_truncated_completions: bool = True
    sync_ref_model: bool = True
    ref_model_mixup_alpha: float = 0.5
    ref_model_sync_steps: int = 100

    # --- schedule and optimizer
    max_steps: int = -1
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    optim: str = "adamw_torch"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 42

    # --- evaluations
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False

    # --- saved states
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None

    # --- what is said
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    log_completions: bool = False
    num_completions_to_print: int | None = None
    report_to: str | Sequence[str] | None = "none"
    project: str = "huggingface"

    # --- the trainer's machine
    bf16: bool = False
    gradient_checkpointing: bool | None = False
    activation_checkpointing: bool | None = None
    use_liger_kernel: bool | None = False
    use_cpu: bool = False
    no_cuda: bool = False

    #: Keys of a run (docs/runs.md), laid over what the arguments say: {"trainer": {"threads": 2}}.
    overrides: Mapping[str, Any]


#: What grpo_defaults sets beside the names.
GRPO_DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_steps": 500,
    "bf16": True,
    "max_grad_norm": 0.01,
    "num_iterations": 1,
    "max_seq_len": 4096,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_only_model": True,
    "logging_steps": 1,
    "log_on_each_node": False,
    "log_completions": True,
    "report_to": "wandb",
}


def grpo_defaults(run_name: str) -> GRPOConfig:
    """The defaults of verifiers for a run of this name, in outputs/<run_name>."""
    return GRPOConfig(output_dir=f"outputs/{run_name}", run_name=run_name, **GRPO_DEFAULTS)


def lora_defaults(r: int = 8, alpha: float = 16) -> LoraConfig:
    """An adapter of the attention's projections, as verifiers' lora_defaults."""
    projections = ["q_proj", "v_proj", "k_proj", "o_proj"]
    return LoraConfig(r=r, lora_alpha=alpha, target_modules=projections, task_type="CAUSAL_LM")
