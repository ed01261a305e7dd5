"""What TRL, prime-rl, SkyRL, verl and OpenRLHF call the keys of a run, for refusals that name the right one.

1. None of these is a key here: a file of theirs means other things by other keys, too, so each is refused.
   (A whole file of prime-rl is read as it is: prime_rl.) Here stand those whose nearest key is not what they
   mean, or is none.
2. What is only called otherwise is told by its name here; where a value would mean something else here, or
   goes elsewhere, the sentence says what to write (other_meanings.py).
3. So it does where a key of the same name is a table there (AS_TABLES).
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.run.other_meanings import OPTIMIZER, OTHERWISE, SCHEDULER

_SAME: dict[str, str] = {
    "model_name": "model",
    "model_path": "model",
    "model_name_or_path": "model",
    "lr": "learning_rate",
    "actor_learning_rate": "learning_rate",
    "policy_lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "num_warmup_steps": "warmup_steps",
    "lr_warmup_steps": "warmup_steps",
    "max_prompt_length": "max_prompt_tokens",
    "max_prompt_len": "max_prompt_tokens",
    "prompt_max_len": "max_prompt_tokens",
    "min_learning_rate": "min_lr",
    "lr_min": "min_lr",
    "eta_min": "min_lr",
    "adam_eps": "adam_epsilon",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "total_steps": "max_steps",
    "total_training_steps": "max_steps",
    "num_train_steps": "max_steps",
    "num_generations": "rollouts_per_example",
    "group_size": "rollouts_per_example",
    "num_rollouts": "rollouts_per_example",
    "n_samples_per_prompt": "rollouts_per_example",
    "rollouts_per_prompt": "rollouts_per_example",
    "max_async_level": "max_off_policy_steps",
    "max_staleness_steps": "max_off_policy_steps",
    "max_completion_length": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "min_new_tokens": "sampling.min_tokens",
    "generate_max_len": "sampling.max_tokens",
    **{
        f"{table}sampling.{name}": f"{table}sampling.{key}"
        for table in ("", "env.", "eval.", "eval.env.")
        for name, key in (
            ("max_new_tokens", "max_tokens"),
            ("min_new_tokens", "min_tokens"),
            ("max_completion_tokens", "max_tokens"),
            ("max_generate_length", "max_tokens"),
            ("response_length", "max_tokens"),
            ("stop_strings", "stop"),
            ("chat_template_kwargs", "template_settings"),
        )
    },
    "max_completion_tokens": "sampling.max_tokens",
    "max_generate_length": "sampling.max_tokens",
    "response_length": "sampling.max_tokens",
    "max_input_length": "max_prompt_tokens",
    "stop_strings": "sampling.stop",
    "temp": "sampling.temperature",
    "chat_template_kwargs": "sampling.template_settings",
    "kl_coef": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "init_kl_coef": "algorithm.kl_coef",
    "save_steps": "ckpt.interval",
    "save_interval": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "eval_steps": "eval.interval",
    "eval.every": "eval.interval",
    "eval.steps": "eval.interval",
    "eval_interval": "eval.interval",
    "lora_rank": "lora.r",
    "lora.rank": "lora.r",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora.lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.target_modules",
    "lora_target_parameters": "lora.target_parameters",
    "wandb_project": "wandb.project",
    "async_level": "max_off_policy_steps",
    "n": "rollouts_per_example",
    "sampling.n": "rollouts_per_example",
    "num_return_sequences": "rollouts_per_example",
    "sampling.num_return_sequences": "rollouts_per_example",
    "num_generations_eval": "eval.rollouts_per_example",
    "eval_n_samples_per_prompt": "eval.rollouts_per_example",
    "eval_on_start": "eval.before",
    "eval_before_train": "eval.before",
    "val_before_train": "eval.before",
    "eval.eval_base_model": "eval.before",
    "data_seed": "seed",
    "pretrain": "model",
    "ref_model": "algorithm.reference.model",
    "ref_model_path": "algorithm.reference.model",
    "teacher_model": "algorithm.reference.model",
    "num_ppo_epochs": "algorithm.num_iterations",
    "update_epochs_per_batch": "algorithm.num_iterations",
    "entropy_coeff": "algorithm.entropy_coef",
    "entropy_loss_coef": "algorithm.entropy_coef",
    "kl_target": "algorithm.target_kl",
    "clip_ratio_c": "algorithm.delta",
    "dynamic_filtering": "algorithm.dynamic_sampling",
    "filter_groups": "algorithm.dynamic_sampling",
    "ckpt_interval": "ckpt.interval",
    "hf_save_interval": "ckpt.interval",
    "checkpointing_steps": "ckpt.interval",
    "max_ckpts_to_keep": "ckpt.keep_last",
    "max_ckpt_num": "ckpt.keep_last",
    "clip_grad": "max_grad_norm",
    "grad_clip_norm": "max_grad_norm",
    "lora_path": "lora.initial_adapter",
    "lora.path": "lora.initial_adapter",
    "adapter_path": "lora.initial_adapter",
    "adapter_name_or_path": "lora.initial_adapter",
    "wandb_entity": "wandb.entity",
    "wandb_org": "wandb.entity",
    "wandb.run_name": "wandb.name",
    "env.ratio": "env.weight",
    "algorithm.name": "algorithm.preset",
    "importance_sampling_level": "algorithm.ratio_level",
    "mask_truncated_completions": "algorithm.overlong_filtering",
    "beta": "algorithm.kl_coef",
    "ppo_epochs": "algorithm.num_iterations",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "eps_clip_low": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "tau_pos": "algorithm.tau_positive",
    "tau_neg": "algorithm.tau_negative",
    "sapo_temperature_pos": "algorithm.tau_positive",
    "sapo_temperature_neg": "algorithm.tau_negative",
    "vespo_k_pos": "algorithm.kernel.k_positive",
    "vespo_lambda_pos": "algorithm.kernel.lambda_positive",
    "vespo_k_neg": "algorithm.kernel.k_negative",
    "vespo_lambda_neg": "algorithm.kernel.lambda_negative",
    "use_bias_correction_kl": "algorithm.kl_weighted",
    "off_policy_mask_threshold": "algorithm.off_policy_mask",
    "entropy_target": "algorithm.target_entropy",
    "algorithm.entropy_target": "algorithm.target_entropy",
    "freeze_moe_router": "freeze_routers",
    "enable_router_replay": "algorithm.router_replay",
    "router_replay": "algorithm.router_replay",
    "ckpt.every": "ckpt.interval",
    "ckpt.steps": "ckpt.interval",
    "save_freq": "ckpt.interval",
    "test_freq": "eval.interval",
    "project_name": "wandb.project",
    "experiment_name": "wandb.name",
    "l2": "weight_decay",
    "eval.freq": "eval.interval",
    "eval_every": "eval.interval",
    "save_every": "ckpt.interval",
    "kl_penalty_coef": "algorithm.kl_coef",
    "max_ckpt_to_keep": "ckpt.keep_last",
    **{
        f"{table}.{name}": key
        for table in ("val_kwargs", "eval_sampling_params")
        for name, key in (
            ("n", "eval.rollouts_per_example"),
            ("temperature", "eval.sampling.temperature"),
            ("top_p", "eval.sampling.top_p"),
            ("top_k", "eval.sampling.top_k"),
            ("min_p", "eval.sampling.min_p"),
            ("max_generate_length", "eval.sampling.max_tokens"),
        )
    },
}

# Whoever has the table, and not yet its names; "beta" is one of them (AlgorithmConfig.ALSO_KEYS).
SAME: Mapping[str, str] = _SAME | {
    f"algorithm.{name}": key
    for name, key in _SAME.items()
    if key.startswith("algorithm.") and "." not in name and name not in ("beta", key.partition(".")[2])
}

#: verl's and SkyRL's tables of what a run says above its first table, or in another.
TABLES_OF_OTHERS: frozenset[str] = frozenset(
    (
        *("actor", "actor_rollout_ref", "data", "eval_sampling_params", "generator", "kl_ctrl"),
        *("optim", "rollout", "scheduler", "val_kwargs"),
    )
)

#: Keys that have one value here, and are tables elsewhere.
AS_TABLES: Mapping[str, str] = {
    "model": "set 'model' to the folder or the hub id alone, at the top of the file",
    "optimizer": OPTIMIZER,
    "lr_scheduler": SCHEDULER,
}

#: What a refusal of each name says.
REMEDIES: Mapping[str, str] = {name: f"it is called {key!r} here" for name, key in SAME.items()} | dict(
    OTHERWISE
)
