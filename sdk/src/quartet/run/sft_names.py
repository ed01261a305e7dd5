"""What TRL, prime-rl and others call the keys of a fine-tuning, for refusals that name the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SAME: Final[Mapping[str, str]] = {
    "model_name": "model",
    "model_path": "model",
    "model_name_or_path": "model",
    "dataset": "data",
    "dataset_name": "data",
    "train_file": "data",
    "train_files": "data",
    "eval_file": "validation",
    "eval_data": "validation",
    "eval_dataset": "validation",
    "val_data": "validation",
    "val_file": "validation",
    "val_files": "validation",
    "validation_data": "validation",
    "validation_file": "validation",
    "eval_interval": "eval.interval",
    "eval_steps": "eval.interval",
    "eval.steps": "eval.interval",
    "eval_on_start": "eval.before",
    "val_interval": "eval.interval",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "num_warmup_steps": "warmup_steps",
    "min_learning_rate": "min_lr",
    "eta_min": "min_lr",
    "adam_eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "total_epochs": "epochs",
    "steps": "max_steps",
    "seq_len": "max_tokens",
    "max_length": "max_tokens",
    "max_seq_len": "max_tokens",
    "max_seq_length": "max_tokens",
    "train_batch_size": "batch_size",
    "tokens_per_batch": "batch_tokens",
    "max_tokens_per_batch": "batch_tokens",
    "batch_size_tokens": "batch_tokens",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora.rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora.lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.target_modules",
    "wandb_project": "wandb.project",
}
_LORA = "write a table [lora] with enabled = true, r and alpha"
_MICROBATCH = "set 'microbatch_tokens', which counts tokens, or leave it to the trainer"
_WHOLE = "batch_size is all of an optimizer step, whatever it takes to compute it; remove it"
OTHERWISE: Final[Mapping[str, str]] = {
    "peft_config": _LORA,
    "use_lora": _LORA,
    "use_peft": _LORA,
    "micro_batch_size": _MICROBATCH,
    "per_device_train_batch_size": _MICROBATCH,
    "per_device_eval_batch_size": _MICROBATCH,
    "gradient_accumulation_steps": _WHOLE,
    "val": "set 'validation' to a file of chats, and 'eval.interval' to a number of steps",
    "packing": "the trainer packs chats as it is; for steps of so many tokens set 'batch_tokens'",
    "truncation": "set 'overlong' to \"cut\", and 'max_tokens' to a number",
    "truncation_mode": "set 'overlong' to \"cut\": what is too long loses its end",
    "assistant_only_loss": 'set \'learns\' to "roles" for true, to "everything" for false',
    "completion_only_loss": "set 'learn_prompts' to true for false; else remove it",
    "dataset_text_field": 'name the column "text"',
    "report_to": "set 'wandb.project' to a project's name, or 'tensorboard.enabled' to true",
    "eval_strategy": "set 'eval.interval' to a number of steps, or 'eval.epochs' to one of passes",
    "save_strategy": "set 'ckpt.interval' to a number of steps, or 'ckpt.epochs' to one of passes",
    "min_lr_ratio": "set 'min_lr', a rate and no share of one",
    "gradient_checkpointing": "set 'gradient_checkpointing' in the table [trainer]",
    "logging_steps": "every step is logged; remove it",
    "output_dir": "name the folder on the command line: --output-dir FOLDER",
}

#: What a refusal of each name says.
REMEDIES: Final[Mapping[str, str]] = {
    name: f"it is called {key!r} here" for name, key in SAME.items()
} | dict(OTHERWISE)

_FILE = "set it to a file of chats, a folder or a pattern, at the top of the file"
#: Keys that have one value here, and are tables elsewhere.
AS_TABLES: Final[Mapping[str, str]] = {
    "model": "set 'model' to the folder or the hub id alone, at the top of the file",
    "data": _FILE,
    "validation": _FILE,
}
