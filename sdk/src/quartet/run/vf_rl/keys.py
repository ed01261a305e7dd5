"""The keys of vf-rl: RLConfig of verifiers 0.1.9 and of the tables around it, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: RLConfig's own keys with their defaults.
DEFAULTS: Mapping[str, Any] = {
    "use_liger": True,
    "use_lora": True,
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "lora_target_modules": None,
    "lora_modules_to_save": None,
    "lora_use_rslora": False,
    "lora_config": None,
    "rollouts_per_example": 16,
    "batch_size": 512,
    "micro_batch_size": 8,
    "max_seq_len": 2048,
    "max_prompt_len": 512,
    "max_steps": 500,
    "max_concurrent": 1024,
    "learning_rate": 1e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "mask_ratio_low": 0.125,
    "mask_ratio_high": 8.0,
    "mask_env_responses": True,
    "mask_truncated_completions": False,
    "zero_truncated_completions": False,
    "max_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "generation_timeout": 600.0,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 300.0,
    "output_dir": None,
    "run_name": None,
    "lr_scheduler_type": "constant",
    "bf16": True,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "save_strategy": "steps",
    "save_steps": 50,
    "eval_strategy": "no",
    "eval_steps": 50,
    "save_only_model": True,
    "logging_steps": 1,
    "log_on_each_node": False,
    "report_to": "wandb",
    "remove_unused_columns": False,
    "shuffle_dataset": True,
}

#: Those of transformers' TrainingArguments, which RLConfig extends, that mean something here.
INHERITED: Mapping[str, Any] = {
    "seed": 42,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-8,
    "save_total_limit": None,
    "eval_on_start": False,
    "fp16": False,
    "deepspeed": None,
    "fsdp": None,
    "resume_from_checkpoint": None,
}

#: Keys that have one key here, with the same values.
SAME = {
    "rollouts_per_example": "rollouts_per_example",
    "batch_size": "batch_size",
    "max_steps": "max_steps",
    "max_concurrent": "max_concurrent",
    "learning_rate": "learning_rate",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_prompt_len": "max_prompt_tokens",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "mask_ratio_low": "algorithm.correction.floor",
    "mask_ratio_high": "algorithm.correction.cap",
    "mask_truncated_completions": "algorithm.overlong_filtering",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "gradient_checkpointing": "trainer.gradient_checkpointing",
    "seed": "seed",
    "save_total_limit": "ckpt.keep_last",
}
#: Of these, those that are called so here, too.
SHARED = frozenset(key for key, path in SAME.items() if key == path)
SAME_OF_LORA = {
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_use_rslora": "lora.use_rslora",
}

#: What RLTrainer does whatever its file says.
ALWAYS = {
    "max_off_policy_steps": 1,
    "algorithm.advantage": "dr_grpo",
    "algorithm.loss": "ppo",
    "algorithm.aggregation": "token",
    "algorithm.proximal": True,
    "algorithm.correction.mode": "mask",
}
LORA_TARGETS = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
SCHEDULERS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}

#: Keys of [trainer.args] that nothing here reads, and why nothing is missed.
WITHOUT_EFFECT = {
    "vllm_server_host": "services find each other",
    "vllm_server_port": "services find each other",
    "vllm_server_timeout": "services find each other",
    "save_only_model": "saved states have the optimizer, too",
    "logging_steps": "every step is logged",
    "log_on_each_node": "every service has its log",
    "remove_unused_columns": "environments keep what they need",
    "logging_dir": "logs are in the output folder",
    "logging_strategy": "every step is logged",
    "logging_first_step": "every step is logged",
    "log_level": "every service has its log",
    "disable_tqdm": "there is --plain",
    "num_train_epochs": "max_steps decides",
    "per_device_train_batch_size": "micro_batch_size decides",
    "per_device_eval_batch_size": "micro_batch_size decides",
    "gradient_accumulation_steps": "batch_size decides",
    "gradient_checkpointing_kwargs": "of another implementation",
    "overwrite_output_dir": "there is --overwrite",
    "dataloader_num_workers": "there is no data loader",
    "ddp_find_unused_parameters": "of another implementation",
    "tf32": "of another implementation",
}
#: Keys of [inference.args] that are of vLLM's HTTP server.
OF_THE_SERVER = {
    "enable_auto_tool_choice": "tool calls are read wherever there are tools",
    "host": "services find each other",
    "port": "services find each other",
    "api_key": "services find each other",
    "served_model_name": "services find each other",
    "uvicorn_log_level": "every service has its log",
    "disable_uvicorn_access_log": "every service has its log",
    "disable_log_requests": "every service has its log",
    "enable_log_requests": "every service has its log",
    "max_log_len": "every service has its log",
    "reasoning_parser": "thinking is read as the chat template marks it",
    "enable_reasoning": "thinking is read as the chat template marks it",
    "return_tokens_as_token_ids": "tokens travel as such",
}
OF_THE_CHAT = {
    "tool_call_parser": "chat.tool_parser",
    "chat_template": "chat.template_file",
    "default_chat_template_kwargs": "chat.template_settings",
}
OF_THE_ENGINE = {
    "dtype": "dtype",
    "max_num_seqs": "max_num_seqs",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}

#: Names of the trainer before RLTrainer, which its documents went on to use, and what to write.
OF_GRPO = {
    "num_generations": "write rollouts_per_example",
    "max_prompt_length": "write max_prompt_len",
    "max_completion_length": "write max_tokens, of one answer, or max_seq_len, of all",
    "loss_type": "write preset in a table [algorithm]",
    "log_completions": "completions are printed, and in rollouts/, by themselves; remove it",
    "num_completions_to_print": "completions are printed, and in rollouts/, by themselves; remove it",
    "async_generation_timeout": "write generation_timeout",
    "num_batches_ahead": "write max_off_policy_steps at the top of the file",
    "num_iterations": "write num_iterations in a table [algorithm]",
    "beta": "write kl_coef in a table [algorithm]",
    "delta": "mask_ratio_low and mask_ratio_high bound the ratio; remove it",
    "epsilon": "mask_ratio_low and mask_ratio_high bound the ratio; remove it",
    "epsilon_high": "mask_ratio_low and mask_ratio_high bound the ratio; remove it",
    "sync_ref_model": "write sync_steps in a table [algorithm.reference]",
    "ref_model_sync_steps": "write sync_steps in a table [algorithm.reference]",
    "ref_model_mixup_alpha": "write mixup_alpha in a table [algorithm.reference]",
}

#: What is vf-rl's of each table.
OF_THE_FORM = {"env": ("id", "args"), "inference": ("gpus", "args"), "trainer": ("gpus", "args")}
