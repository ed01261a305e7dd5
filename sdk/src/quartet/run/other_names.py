"""What TRL, prime-rl, SkyRL, verl and OpenRLHF call the keys of a run, for refusals that name the right one.

1. None of these is a key here: a file of theirs means other things by other keys, too, so each is refused.
   (A whole file of prime-rl is read as it is: prime_rl.)
2. What is only called otherwise is told by its name here; where a value would mean something else here, or
   goes elsewhere, the sentence says what to write.
3. So it does where a key of the same name is a table there (AS_TABLES).
"""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {
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
            ("chat_template_kwargs", "template_settings"),
        )
    },
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
    "wandb_project": "wandb.project",
    "async_level": "max_off_policy_steps",
    "n": "rollouts_per_example",
    "sampling.n": "rollouts_per_example",
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
}

_BATCH = "set 'batch_size', which counts the rollouts (not prompts) of a whole optimizer step"
_CLIP = "set 'algorithm.epsilon' beside an 'algorithm.preset' that clips, such as \"grpo\""
_REFERENCE = "set 'algorithm.reference.sync_steps' and 'mixup_alpha' beside an 'algorithm.kl_coef' above 0"
_ENV = 'write a table [[env]] with id = "..." for each environment'
_MINIBATCHES = "set 'algorithm.num_minibatches', into how many a batch is divided"
_MICROBATCH = "set 'microbatch_tokens', which counts tokens, or leave it to the trainer"
_STEPS = "set 'max_steps', of batch_size rollouts each"
_REWARD = "rewards are the environment's (docs/environments.md); remove it"
_CRITIC = "there is no critic: rollouts of one task are compared ('algorithm.advantage'); remove it"
_DEVICES = "set 'gpus' in the tables [trainer] and [inference]"
_SAMPLED = "how many are sampled is 'rollouts_per_example', how, the table [sampling]"
_PRESET = "set 'algorithm.preset'; docs/algorithms.md lists the presets and what each is made of"

_OPTIMIZER = (
    "'optimizer' (its type), 'learning_rate', 'weight_decay', 'adam_beta1' and 'adam_beta2' (betas) and "
    "'max_grad_norm' stand at the top of the file, above every table"
)
_SCHEDULER = (
    "'lr_scheduler' (its type), 'warmup_steps', 'decay_steps' and 'min_lr' stand at the top of the file"
)

_VLLM = 'write it as an argument of vLLM: a table [inference.vllm.args], and engine = "vllm" in [inference]'
_OVERWRITE = "write --overwrite on the command line, which deletes what the output folder holds"
_ONE_TEMPERATURE = (
    "the loss of a batch reads one temperature: set 'sampling.temperature', which holds for all environments"
)
_LENGTH = "set 'max_model_len' in the table [inference], or 'sampling.max_tokens'"

OTHERWISE: Mapping[str, str] = {
    "report_to": "set 'wandb.project' to a project's name, or 'tensorboard.enabled' to true",
    "wandb.offline": "set 'wandb.mode' to \"offline\"",
    "env.temperature": _ONE_TEMPERATURE,
    "env.sampling.temp": _ONE_TEMPERATURE,
    "env.sampling.temperature": _ONE_TEMPERATURE,
    "seq_len": _LENGTH,
    "max_model_len": _LENGTH,
    "max_seq_len": _LENGTH,
    "gradient_checkpointing": "set 'gradient_checkpointing' in the table [trainer]",
    "optim_cpu_offload": "set 'optimizer_offload' in the table [trainer]",
    "bf16": "set 'compute_dtype' to \"bfloat16\"",
    "dtype": "set 'compute_dtype', and 'served_dtype' where the two differ",
    "scale_rewards": "set 'algorithm.advantage': dr_grpo does not divide by the group's deviation, grpo does",
    "epsilon": _CLIP,
    "epsilon_high": _CLIP,
    "optim": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "warmup_ratio": "set 'warmup_steps', a number of steps",
    "min_lr_ratio": "set 'min_lr', a rate and no share of one",
    "min_lr_rate": "set 'min_lr', a rate and no share of one",
    "rollout_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _MICROBATCH,
    "micro_train_batch_size": _MICROBATCH,
    "per_device_batch_size": _MICROBATCH,
    "mini_batch_size": _MINIBATCHES,
    "ppo_mini_batch_size": _MINIBATCHES,
    "loss_type": _PRESET,
    "algorithm.loss_type": _PRESET,
    "num_train_epochs": _STEPS,
    "num_epochs": _STEPS,
    "epochs": _STEPS,
    "total_epochs": _STEPS,
    "advantage_estimator": _PRESET,
    "adv_estimator": _PRESET,
    "algorithm.advantage_estimator": _PRESET,
    "algorithm.adv_estimator": _PRESET,
    "gamma": _CRITIC,
    "lam": _CRITIC,
    "critic": _CRITIC,
    "reward": _REWARD,
    "reward_model": _REWARD,
    "reward_funcs": _REWARD,
    "reward_weights": _REWARD,
    "dataset": _ENV,
    "train_files": _ENV,
    "buffer": "write a table [difficulty_filter]",
    "generator": _SAMPLED,
    "rollout": _SAMPLED,
    "actor_rollout_ref": f"{_OPTIMIZER}; {_SAMPLED}",
    "deployment": _DEVICES,
    "n_gpus_per_node": _DEVICES,
    "num_gpus": _DEVICES,
    "gpus": _DEVICES,
    "config": "write '@ FILE.toml'",
    "config_file": "write '@ FILE.toml'",
    "output_dir": "name the folder on the command line: --output-dir FOLDER",
    "clean": _OVERWRITE,
    "clean_output_dir": _OVERWRITE,
    "logging_steps": "every step is logged; remove it",
    "use_vllm": 'choose engine = "vllm" in the table [inference]',
    "vllm_mode": "inference is a service of its own ([inference]); remove it",
    "overlong_buffer": (
        "set 'algorithm.overlong_penalty.from_tokens' and 'algorithm.overlong_penalty.to_tokens', between "
        "which the penalty grows"
    ),
    "clip_range": _CLIP,
    "clip_ratio": _CLIP,
    "eps_clip": _CLIP,
    "ref_model_sync_steps": _REFERENCE,
    "ref_model_mixup_alpha": _REFERENCE,
    "environment": _ENV,
    "environments": _ENV,
    "peft_config": "write a table [lora] with enabled = true, r and alpha",
    "weight_broadcast": "weights travel over gRPC, and through shared memory on one host; remove it",
    "data": _ENV,
    "gpu_memory_utilization": _VLLM,
    "tensor_parallel_size": _VLLM,
    "parallel": _VLLM,
}

#: Keys that have one value here, and are tables elsewhere.
AS_TABLES: Mapping[str, str] = {
    "model": "set 'model' to the folder or the hub id alone, at the top of the file",
    "optimizer": _OPTIMIZER,
    "lr_scheduler": _SCHEDULER,
}

#: What a refusal of each name says.
REMEDIES: Mapping[str, str] = {name: f"it is called {key!r} here" for name, key in SAME.items()} | dict(
    OTHERWISE
)
