"""What TRL, prime-rl, axolotl, LLaMA-Factory, OpenRLHF, verl and others call the keys of a fine-tuning, for
refusals that name the right one.

1. As of a run (other_names.py): none of these is a key here. What is only called otherwise is told by its
   name here (SAME); where a value would mean something else, or is said elsewhere, the sentence says what to
   write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from quartet.run.other_meanings import NO_WANDB, OPTIMIZER, SCHEDULER, STATES, VARIABLES, WANDB_ENABLED


def _of(key: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, key)


SAME: Final[Mapping[str, str]] = {
    **_of("model", "model_name", "model_path", "model_name_or_path", "base_model", "pretrain"),
    **_of("data", "dataset", "datasets", "dataset_name", "train_data", "train_file", "train_files"),
    **_of("validation", "eval_file", "eval_data", "eval_dataset", "val_data", "val_file", "val_files"),
    **_of("validation", "validation_data", "validation_file", "test_datasets"),
    **_of("eval.interval", "eval_interval", "eval_steps", "eval.steps", "eval.every", "val_interval"),
    **_of("eval.interval", "eval.freq", "eval_every", "test_freq"),
    **_of("eval.before", "eval_on_start", "eval_before_train", "val_before_train", "eval.eval_base_model"),
    **_of("learning_rate", "lr", "actor_learning_rate", "policy_lr"),
    "lr_scheduler_type": "lr_scheduler",
    **_of("warmup_steps", "num_warmup_steps", "lr_warmup_steps"),
    **_of("warmup_ratio", "lr_warmup_ratio", "warmup_steps_ratio"),
    **_of("min_lr", "min_learning_rate", "lr_min", "eta_min"),
    **_of("adam_epsilon", "adam_eps"),
    "l2": "weight_decay",
    **_of("max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad", "grad_clip_norm", "max_norm"),
    **_of("epochs", "num_train_epochs", "num_epochs", "total_epochs", "max_epochs"),
    **_of("max_steps", "steps", "num_steps", "num_train_steps", "total_steps", "total_training_steps"),
    **_of("max_tokens", "seq_len", "max_len", "max_length", "max_seq_len", "max_seq_length"),
    **_of("max_tokens", "sequence_len", "cutoff_len", "max_model_len"),
    "train_batch_size": "batch_size",
    **_of("batch_tokens", "tokens_per_batch", "max_tokens_per_batch", "batch_size_tokens"),
    "data_seed": "seed",
    "roles_to_train": "roles",
    "train_on_prompt": "learn_prompts",
    **_of("ckpt.interval", "save_steps", "save_interval", "save_freq", "ckpt_interval", "hf_save_interval"),
    **_of("ckpt.interval", "checkpointing_steps", "ckpt.every", "ckpt.steps", "save_every"),
    **_of("ckpt.keep_last", "save_total_limit", "max_ckpts_to_keep", "max_ckpt_to_keep", "max_ckpt_num"),
    **_of("lora.r", "lora_r", "lora_rank", "lora.rank"),
    **_of("lora.alpha", "lora_alpha", "lora.lora_alpha"),
    **_of("lora.dropout", "lora_dropout", "lora.lora_dropout"),
    **_of("lora.target_modules", "lora_target_modules", "lora_target"),
    **_of("lora.target_parameters", "lora_target_parameters"),
    **_of("lora.modules_to_save", "lora_modules_to_save", "additional_target"),
    **_of("lora.use_rslora", "use_rslora", "peft_use_rslora"),
    **_of("lora.initial_adapter", "lora_path", "lora.path", "adapter_path", "adapter_name_or_path"),
    "lora_model_dir": "lora.initial_adapter",
    **_of("wandb.project", "wandb_project", "project_name"),
    **_of("wandb.name", "wandb_name", "wandb.run_name", "wandb_run_name", "run_name", "experiment_name"),
    **_of("wandb.entity", "wandb_entity", "wandb_org"),
}


def _says(sentence: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, sentence)


_PACKED = (
    "set 'packing' to \"best_fit\" for steps of rows as TRL packs them, or 'batch_tokens' for steps of so "
    "many tokens"
)
_PADDED = "the trainer packs chats into micro-batches, in which none sees another; remove it"
_LORA = "write a table [lora] with enabled = true, r and alpha"
_MICROBATCH = "set 'microbatch_tokens', which counts tokens, or leave it to the trainer"
_CHATS = "set 'batch_size', the chats of an optimizer step, of all devices together"
_WHOLE = "batch_size is all of an optimizer step, whatever it takes to compute it; remove it"
_FOLDER = "name the folder on the command line: --output-dir FOLDER"
_RESUME = "write --resume on the command line, with the --output-dir of the fine-tuning"
_SHOWN = (
    "set 'wandb.project' to a project's name, 'mlflow.experiment' to an experiment's, or "
    "'tensorboard.enabled' to true"
)
_LOGGED = "every step is logged; remove it"
_CUT = "set 'overlong' to \"cut\": what is too long loses its end"
_ROLES = 'set \'learns\' to "roles" for true, to "everything" for false'
_TEMPLATE = "chats are rendered by the chat template of the model's folder; put it there"
_LINE = "it belongs to a line of the data: chat_template_kwargs beside its messages"
_FILES = "set 'data' to a file, a folder or a pattern of one set; remove it"
_HELD_OUT = "set 'validation' to a file of chats: nothing of the data is held out"
_ARITHMETIC = "the trainer chooses its arithmetic by device (docs/trainer.md); remove it"
_WIDE = "no model is trained in so few bits here; remove it"
_RANKS = "set 'ranks' in the table [trainer]: weights and optimizer are shared out; remove it"
_LOW_RANK = "adapters here are low-rank matrices alone; remove it"
_BEST = "the model of the smallest loss on validation is written by quartet export --best; remove it"
_FOLDER_ALONE = "a fine-tuning writes a folder, checkpoint/; remove it"
_OVERWRITE = "no fine-tuning is overwritten: delete its folder, or name another --output-dir"
_OFFLOAD = "set 'optimizer_offload' in the table [trainer]"
_CHECKPOINTING = "set 'gradient_checkpointing' in the table [trainer]"
_BETAS = "set 'adam_beta1' and 'adam_beta2'"
_LOSS = "the loss is that of the tokens themselves; remove it"

OTHERWISE: Final[Mapping[str, str]] = {
    **_says(_LORA, ("peft_config", "use_lora", "use_peft", "adapter", "finetuning_type", "peft")),
    "per_device_train_batch_size": _CHATS,
    **_says(_MICROBATCH, ("micro_batch_size", "per_device_eval_batch_size")),
    **_says(_MICROBATCH, ("micro_train_batch_size", "per_device_batch_size", "micro_batch_size_per_gpu")),
    **_says(_MICROBATCH, ("eval_batch_size", "micro_train_batch_size_per_gpu", "mini_batch_size")),
    **_says(_WHOLE, ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum")),
    "val": "set 'validation' to a file of chats, and 'eval.interval' to a number of steps",
    **_says(_HELD_OUT, ("val_size", "val_set_size", "eval_ratio", "test_size", "validation_split")),
    **_says(_PACKED, ("packing_strategy", "pack_function", "sample_packing", "neat_packing", "packed")),
    **_says(_PACKED, ("packing_samples", "use_sample_packing", "use_dynamic_bsz", "pack_sequences")),
    **_says(_PADDED, ("padding_free", "pad_to_sequence_len", "pad_to_multiple_of", "flash_attention")),
    "use_remove_padding": _PADDED,
    **_says(_PADDED, ("eval_packing", "eval_sample_packing", "group_by_length", "attn_implementation")),
    "truncation": "set 'overlong' to \"cut\", and 'max_tokens' to a number",
    **_says(_CUT, ("truncation_mode", "truncation_side", "excess_length_strategy")),
    "assistant_only_loss": _ROLES,
    "train_on_inputs": 'set \'learns\' to "everything" for true, to "roles" for false',
    "completion_only_loss": "set 'learn_prompts' to true for false; else remove it",
    "mask_prompt": "set 'learn_prompts' to true for false; else remove it",
    "dataset_text_field": 'name the column "text"',
    **_says(_FILES, ("dataset_dir", "dataset_config", "dataset_train_split", "dataset_test_split", "split")),
    "max_samples": "set 'max_steps', or give a file of fewer lines",
    **_says(_TEMPLATE, ("chat_template", "chat_template_path", "template", "eos_token", "pad_token")),
    "apply_chat_template": "chats are rendered by it, and text is not; remove it",
    **_says(_LINE, ("chat_template_kwargs", "enable_thinking")),
    **_says(_SHOWN, ("report_to", "logger", "use_wandb", "use_tensorboard")),
    "tensorboard_dir": "set 'tensorboard.enabled' to true; event files are written into the output folder",
    "wandb.offline": "set 'wandb.mode' to \"offline\"",
    "no_wandb": NO_WANDB,
    "wandb.enabled": WANDB_ENABLED,
    "eval_strategy": "set 'eval.interval' to a number of steps, or 'eval.epochs' to one of passes",
    "save_strategy": "set 'ckpt.interval' to a number of steps, or 'ckpt.epochs' to one of passes",
    "evals_per_epoch": "set 'eval.epochs' to passes from one to the next, such as 0.25 for 4",
    "saves_per_epoch": "set 'ckpt.epochs' to passes from one to the next, such as 0.25 for 4",
    **_says("set 'min_lr', a rate and no share of one", ("min_lr_ratio", "min_lr_rate", "lr_min_ratio")),
    **_says(_BETAS, ("betas", "adam_betas")),
    "optim": OPTIMIZER,
    "scheduler": SCHEDULER,
    **_says(_LOSS, ("label_smoothing", "label_smoothing_factor", "loss_type", "neftune_noise_alpha")),
    **_says(_CHECKPOINTING, ("gradient_checkpointing", "activation_checkpointing")),
    "enable_gradient_checkpointing": _CHECKPOINTING,
    **_says(_OFFLOAD, ("optim_cpu_offload", "adam_offload", "optimizer_offload", "param_offload")),
    **_says(_ARITHMETIC, ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "mixed_precision")),
    **_says(_WIDE, ("load_in_4bit", "load_in_8bit", "quantization_bit")),
    **_says(_RANKS, ("deepspeed", "fsdp", "fsdp_config", "zero_stage", "nproc_per_node", "num_gpus")),
    **_says(_RANKS, ("num_processes", "n_gpus_per_node", "gpus")),
    "device": "set 'device' in the table [trainer]",
    **_says(_LOW_RANK, ("lora.use_dora", "use_dora", "lora.bias", "lora.lora_bias", "lora_bias")),
    "lora.task_type": "it is a causal language model's; remove it",
    **_says("leave 'lora.target_modules' out: it means all linear modules", ("lora_target_linear",)),
    **_says(_BEST, ("load_best_model_at_end", "metric_for_best_model", "early_stopping_patience")),
    **_says(_FOLDER_ALONE, ("push_to_hub", "hub_model_id")),
    **_says(_LOGGED, ("logging_steps", "log_interval")),
    **_says(_FOLDER, ("output_dir", "ckpt_path", "save_path", "checkpoint_dir", "default_local_dir")),
    **_says(STATES, ("checkpoint", "checkpoints", "checkpointing")),
    **_says(_FOLDER, ("log_dir", "log_path", "logdir", "logging_dir")),
    **_says(_RESUME, ("resume_from_checkpoint", "resume_from", "resume_mode", "load_checkpoint")),
    "ckpt.resume_step": _RESUME,
    **_says(_OVERWRITE, ("overwrite_output_dir", "force", "clean", "clean_output_dir")),
    **_says("write '@ FILE.toml'", ("config", "config_file")),
    **_says(VARIABLES, ("env_file", "env_files")),
}

#: What a refusal of each name says.
REMEDIES: Final[Mapping[str, str]] = {
    name: f"it is called {key!r} here" for name, key in SAME.items()
} | dict(OTHERWISE)

#: Tables of others, of what stands at the top of the file here.
TABLES_OF_OTHERS: Final = frozenset(("optim", "scheduler"))

_FILE = "set it to a file of chats, a folder or a pattern, at the top of the file"
#: Keys that have one value here, and are tables elsewhere.
AS_TABLES: Final[Mapping[str, str]] = {
    "model": "set 'model' to the folder or the hub id alone, at the top of the file",
    "data": _FILE,
    "validation": _FILE,
    "optimizer": OPTIMIZER,
    "lr_scheduler": SCHEDULER,
}
