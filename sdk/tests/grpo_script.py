"""A script that sets everything, and the run that arguments become."""

from __future__ import annotations

from typing import Any

import quartet.grpo as vf
from quartet.grpo.translate import Translation, translate
from quartet.scripts.models import Model

# What a page about GRPOTrainer has a script set.
SCRIPT: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 16,
    "gradient_accumulation_steps": 4,
    "max_tokens": 1024,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "max_prompt_length": 1024,
    "max_completion_length": 2048,
    "max_seq_len": 4096,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_steps": 500,
    "num_iterations": 1,
    "max_grad_norm": 0.01,
    "beta": 0.001,
    "sync_ref_model": True,
    "ref_model_sync_steps": 100,
    "ref_model_mixup_alpha": 0.5,
    "loss_type": "dr_grpo",
    "epsilon": 0.2,
    "delta": None,
    "num_batches_ahead": 1,
    "async_generation_timeout": 300.0,
    "max_concurrent": 1024,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "per_device_eval_batch_size": 16,
    "repetition_penalty": 1.1,
    "min_p": 0.05,
    "gradient_checkpointing": True,
    "ds3_gather_for_generation": False,
    "generation_batch_size": 16,
    "logging_steps": 1,
    "log_completions": True,
    "report_to": "wandb",
    "num_completions_to_print": 5,
}


def translated(*, model: Model | None = None, peft_config: Any = None, **given: Any) -> Translation:
    args = vf.grpo_defaults("r")
    for name, value in given.items():
        setattr(args, name, value)
    return translate(args, model or Model("m", "/m"), [vf.Environment("e")], peft_config, context=2048)


def at(run: Translation, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = run.config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
