"""What TRL, prime-rl, SkyRL, verl and OpenRLHF have keys for and a run says otherwise, or not at all: a
sentence for each, which says what to write.

What is only called otherwise is in other_names.py.
"""

from __future__ import annotations

from collections.abc import Mapping

_BATCH = "set 'batch_size', which counts the rollouts (not prompts) of a whole optimizer step"
_CLIP = "set 'algorithm.epsilon' beside an 'algorithm.preset' that clips, such as \"grpo\""
_REFERENCE = "set 'algorithm.reference.sync_steps' and 'mixup_alpha' beside an 'algorithm.kl_coef' above 0"
_ENV = 'write a table [[env]] with id = "..." for each environment'
_MINIBATCHES = "set 'algorithm.num_minibatches', into how many a batch is divided"
_MICROBATCH = "set 'microbatch_tokens', which counts tokens, or leave it to the trainer"
_STEPS = "set 'max_steps', of batch_size rollouts each"
_PASSES = (
    f"{_STEPS}; so many passes are passes x examples x rollouts_per_example / batch_size steps "
    "('quartet env show ID' counts the examples)"
)
_REWARD = "rewards are the environment's (docs/environments.md); remove it"
_CRITIC = "there is no critic: rollouts of one task are compared ('algorithm.advantage'); remove it"
_DEVICES = "set 'gpus' in the tables [trainer] and [inference]"
_SAMPLED = "how many are sampled is 'rollouts_per_example', how, the table [sampling]"
_RESUME = "write --resume on the command line, with the --output-dir of the run"
_FOLDER = "name the folder on the command line: --output-dir FOLDER"
_END = (
    "an answer ends with the end tokens of the model's own files; for other ends set 'sampling.stop' to a "
    "list of texts"
)
_SHOWN = (
    "set 'wandb.project' to a project's name, 'mlflow.experiment' to an experiment's, or "
    "'tensorboard.enabled' to true"
)
_SCALE = "set 'algorithm.advantage': dr_grpo does not divide by the group's deviation, grpo does"
_KL = "set 'algorithm.kl_coef' to more than 0; the penalty is a part of the loss"
_KL_ADAPTS = "set 'algorithm.target_kl' for a coefficient that adapts"
_AGGREGATION = "set 'algorithm.aggregation' to token, sequence or constant"
_LOSS = "set 'algorithm.loss'; docs/algorithms.md has them, with their formulas"
_CORRECTION = (
    "each token is weighed against the policy that sampled it; for weights beside that set "
    "'algorithm.proximal' and 'algorithm.correction.mode'"
)
_KL_KIND = "set 'algorithm.kl_estimator' to k1, k2 or k3 (low_var_kl is k3)"
_ADAPTER = "write a table [lora] with enabled = true, r and alpha"
_LOW_RANK = "adapters here are low-rank matrices alone; remove it"
_ENV_ARGUMENT = "it is for the environment to know: write it into args of its table [[env]]"
_PACKED = "the trainer packs samples as it is; remove it"
_LEVEL = "set 'log_level' in the table of a service, such as [orchestrator]"
_RANKS = "set 'gpus' in the table [trainer]: weights and optimizer are shared out (docs/ranks.md); remove it"
_ELSEWHERE = "inference is a service of its own ([inference]); remove it"
_GENERATED = (
    "set 'batch_size' to what is sampled at once, and 'algorithm.num_minibatches' to the optimizer steps "
    "that it is divided into"
)
_OFFLOAD = "set 'optimizer_offload' in the table [trainer]"
_DTYPE = "set 'compute_dtype', and 'served_dtype' where the two differ"
_WIDE = "no model is trained in so few bits here; remove it"
_LOGGED = "every step is logged; remove it"
_BEST = "the model of the best evaluation is written by quartet export --best; remove it"
_PRESET = "set 'algorithm.preset'; docs/algorithms.md lists the presets and what each is made of"

NO_WANDB = "set 'wandb.mode' to \"disabled\""
WANDB_ENABLED = "set 'wandb.project', which switches it on, or 'wandb.mode' to \"disabled\""
STATES = "write a table [ckpt] with interval, in steps, and keep_last"
OPTIMIZER = (
    "'optimizer' (its type), 'learning_rate', 'weight_decay', 'adam_beta1' and 'adam_beta2' (betas) and "
    "'max_grad_norm' stand at the top of the file, above every table"
)
SCHEDULER = (
    "'lr_scheduler' (its type), 'warmup_steps', 'decay_steps' and 'min_lr' stand at the top of the file"
)

_VLLM = 'write it as an argument of vLLM: a table [inference.vllm.args], and engine = "vllm" in [inference]'
_OVERWRITE = "write --overwrite on the command line, which deletes what the output folder holds"
_ONE_TEMPERATURE = (
    "the loss of a batch reads one temperature: set 'sampling.temperature', which holds for all environments"
)
_LENGTH = "set 'max_model_len' in the table [inference], or 'sampling.max_tokens'"

_UNDER_WAY = (
    "set 'max_concurrent' to how many rollouts are under way at once: what is sampled beyond a batch is the "
    "next one's"
)
VARIABLES = "services inherit the environment: set its variables where the command is given; remove it"

#: What verl and SkyRL have in their table [algorithm], and others without one.
_OF_CREDIT_AND_LOSS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "scale_rewards",
            "whiten_rewards",
            "normalize_reward",
            "norm_adv_by_std_in_grpo",
            "grpo_norm_by_std",
        ),
        _SCALE,
    ),
    **dict.fromkeys(("loss_agg_mode", "loss_reduction"), _AGGREGATION),
    **dict.fromkeys(("kl_loss_type", "kl_estimator_type", "kl_penalty_type"), _KL_KIND),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), _KL),
    **dict.fromkeys(("adap_kl_ctrl", "kl_ctrl", "horizon"), _KL_ADAPTS),
    **dict.fromkeys(("loss_type", "advantage_estimator", "adv_estimator", "loss_fn"), _PRESET),
    **dict.fromkeys(("policy_loss_type", "loss_mode"), _LOSS),
    **dict.fromkeys(("gamma", "lam", "lambd", "gae_lambda", "lambda"), _CRITIC),
    **dict.fromkeys(("use_tis", "tis_imp_ratio_cap", "off_policy_correction", "rollout_is"), _CORRECTION),
    **dict.fromkeys(("clip", "clip_range", "cliprange", "clip_ratio"), _CLIP),
    **dict.fromkeys(("eps_clip", "clip_eps", "clip_epsilon"), _CLIP),
    **dict.fromkeys(("ref_model_sync_steps", "ref_model_mixup_alpha"), _REFERENCE),
}

OTHERWISE: Mapping[str, str] = {
    **{f"{table}{name}": said for table in ("", "algorithm.") for name, said in _OF_CREDIT_AND_LOSS.items()},
    **dict.fromkeys(("report_to", "logger", "use_wandb", "use_tensorboard"), _SHOWN),
    **dict.fromkeys(
        ("run_name", "wandb_name"), "write --run-id NAME; in Weights & Biases it is 'wandb.name'"
    ),
    **dict.fromkeys(("overwrite_output_dir", "force"), _OVERWRITE),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_from", "resume_mode", "load_checkpoint", "ckpt.resume_step"),
        _RESUME,
    ),
    **dict.fromkeys(
        (
            f"{table}{name}"
            for table in ("", "sampling.")
            for name in ("eos_token", "eos_token_id", "stop_token", "stop_tokens", "stop_token_ids")
        ),
        _END,
    ),
    **dict.fromkeys(("stop_token_id", "ignore_eos_token"), _END),
    "sampling.ignore_eos": "set 'sampling.min_tokens' to as much as 'sampling.max_tokens'",
    "sampling.max_length": "set 'sampling.max_tokens', which counts the answer without its prompt",
    "sampling.do_sample": "set 'sampling.temperature'; 0 is greedy",
    "sampling.logprobs": "every sampled token comes with its log-probability; remove it",
    "sampling.extra_body": "what is in it stands in [sampling] itself; remove the table around it",
    **dict.fromkeys(
        ("enable_thinking", "sampling.enable_thinking", "sampling.thinking"),
        "write it into 'sampling.template_settings', such as { enable_thinking = false }",
    ),
    "generation_kwargs": "what is in it stands in the table [sampling]",
    **dict.fromkeys(("generation_batch_size", "steps_per_generation"), _GENERATED),
    **dict.fromkeys(("max_length", "max_seq_length"), _LENGTH),
    **dict.fromkeys(("grad_accum", "gradient_accumulation"), _BATCH),
    "per_device_eval_batch_size": "'max_concurrent' bounds the rollouts under way, those of evaluations too",
    "sync_ref_model": _REFERENCE,
    "reference": "write a table [algorithm.reference]",
    "save_strategy": "set 'ckpt.interval' to a number of steps",
    "eval_strategy": "set 'eval.interval' to a number of steps",
    "fp16": "set 'compute_dtype' to \"bfloat16\": nothing is trained in float16",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), _BEST),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "a run writes a folder, checkpoint/; remove it"),
    **dict.fromkeys(("ckpt_path", "save_path", "checkpoint_dir", "default_local_dir"), _FOLDER),
    **dict.fromkeys(("log_dir", "log_path", "logdir", "logging_dir"), _FOLDER),
    "tensorboard_dir": "set 'tensorboard.enabled' to true; event files are written into the output folder",
    "log_interval": _LOGGED,
    **dict.fromkeys(("log", "log_level", "verbose", "debug"), _LEVEL),
    **dict.fromkeys(("system_prompt", "max_turns", "tools"), _ENV_ARGUMENT),
    **dict.fromkeys(("use_lora", "use_peft"), _ADAPTER),
    **dict.fromkeys(("lora.use_dora", "lora.bias", "lora.lora_bias"), _LOW_RANK),
    "lora.task_type": "it is a causal language model's; remove it",
    **dict.fromkeys(
        ("use_dynamic_bsz", "packing", "packing_samples", "use_remove_padding", "use_sample_packing"), _PACKED
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _WIDE),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "zero_stage", "nproc_per_node"), _RANKS),
    **dict.fromkeys(("nnodes", "num_nodes"), "set 'nodes' in the tables [trainer] and [inference]"),
    **dict.fromkeys(
        ("vllm_num_engines", "num_inference_engines"),
        "set 'replicas' in the table [inference] to how many engines each of its machines has",
    ),
    "device": "set 'device' in the table of a service, such as [trainer]",
    "no_wandb": NO_WANDB,
    "wandb.enabled": WANDB_ENABLED,
    "wandb.offline": "set 'wandb.mode' to \"offline\"",
    "env.temperature": _ONE_TEMPERATURE,
    "env.sampling.temp": _ONE_TEMPERATURE,
    "env.sampling.temperature": _ONE_TEMPERATURE,
    "seq_len": _LENGTH,
    "max_model_len": _LENGTH,
    "max_seq_len": _LENGTH,
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_gradient_checkpointing"),
        "set 'gradient_checkpointing' in the table [trainer]",
    ),
    **dict.fromkeys(("optim_cpu_offload", "adam_offload", "param_offload", "optimizer_offload"), _OFFLOAD),
    "bf16": "set 'compute_dtype' to \"bfloat16\"",
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    "epsilon": _CLIP,
    "epsilon_high": _CLIP.replace("epsilon", "epsilon_high"),
    "optim": OPTIMIZER,
    "scheduler": SCHEDULER,
    "warmup_ratio": "set 'warmup_steps', a number of steps",
    **dict.fromkeys(("betas", "adam_betas"), "set 'adam_beta1' and 'adam_beta2'"),
    "min_lr_ratio": "set 'min_lr', a rate and no share of one",
    "min_lr_rate": "set 'min_lr', a rate and no share of one",
    "rollout_batch_size": _BATCH,
    "groups_per_batch": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _MICROBATCH,
    "micro_train_batch_size": _MICROBATCH,
    "per_device_batch_size": _MICROBATCH,
    "micro_rollout_batch_size": _MICROBATCH,
    "local_rollout_forward_batch_size": _MICROBATCH,
    "micro_train_batch_size_per_gpu": _MICROBATCH,
    "micro_forward_batch_size_per_gpu": _MICROBATCH,
    "ppo_micro_batch_size_per_gpu": _MICROBATCH,
    "log_prob_micro_batch_size_per_gpu": _MICROBATCH,
    "ppo_max_token_len_per_gpu": _MICROBATCH,
    "mini_batch_size": _MINIBATCHES,
    "ppo_mini_batch_size": _MINIBATCHES,
    "policy_mini_batch_size": _MINIBATCHES,
    **dict.fromkeys(
        ("critic", "critic_learning_rate", "critic_warmup", "vf_coef", "value_clip", "cliprange_value"),
        _CRITIC,
    ),
    "num_train_epochs": _PASSES,
    "num_epochs": _PASSES,
    "epochs": _PASSES,
    "total_epochs": _PASSES,
    "num_episodes": _STEPS,
    "total_episodes": _STEPS,
    "max_epochs": f"{_STEPS}; for several passes over each batch 'algorithm.num_iterations'",
    "reward": _REWARD,
    "reward_model": _REWARD,
    "reward_funcs": _REWARD,
    **dict.fromkeys(("custom_reward_function", "reward_fn", "reward_manager"), _REWARD),
    "reward_weights": (
        f"{_REWARD}; for advantages of each reward apart set 'algorithm.reward_weights' beside "
        "'algorithm.advantage' = \"gdpo\""
    ),
    **dict.fromkeys(("remote_rm_url", "reward_pretrain", "rubric", "judge"), _REWARD),
    **dict.fromkeys(
        ("dataset", "dataset_name", "prompt_data", "train_data", "val_data", "train_files", "val_files"), _ENV
    ),
    "env_class": _ENV,
    "buffer": "write a table [difficulty_filter]",
    "oversampling_factor": _UNDER_WAY,
    "trajectory_strategy": "rollouts of several turns are one sample, as they were sampled; remove it",
    **dict.fromkeys(("env_file", "env_files"), VARIABLES),
    "val": "write a table [eval], with num_examples, rollouts_per_example and interval",
    **dict.fromkeys(("checkpoint", "checkpoints", "checkpointing"), STATES),
    "generator": _SAMPLED,
    "rollout": _SAMPLED,
    "actor_rollout_ref.model.path": "set 'model' to its folder or hub id, above the first [[env]]",
    "actor_rollout_ref": f"{OPTIMIZER}; {_SAMPLED}",
    "deployment": _DEVICES,
    "n_gpus_per_node": _DEVICES,
    "num_gpus": _DEVICES,
    **dict.fromkeys(("gpu", "gpus", "cuda"), _DEVICES),
    **dict.fromkeys(("colocate_all", "colocate_all_models"), _DEVICES),
    "config": "write '@ FILE.toml'",
    "config_file": "write '@ FILE.toml'",
    "output_dir": _FOLDER,
    "clean": _OVERWRITE,
    "clean_output_dir": _OVERWRITE,
    "logging_steps": _LOGGED,
    **dict.fromkeys(("use_vllm", "rollout.name"), 'choose engine = "vllm" in the table [inference]'),
    **dict.fromkeys(
        ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url"), _ELSEWHERE
    ),
    **dict.fromkeys(
        ("overlong_buffer", "overlong_buffer_len"),
        "set 'algorithm.overlong_penalty.from_tokens' and 'algorithm.overlong_penalty.to_tokens', between "
        "which the penalty grows",
    ),
    "environment": _ENV,
    "environments": _ENV,
    "peft_config": _ADAPTER,
    "weight_broadcast": "weights travel over gRPC, and through shared memory on one host; remove it",
    "data": _ENV,
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), _VLLM),
    **dict.fromkeys(("tensor_parallel_size", "vllm_tensor_parallel_size", "parallel", "tp"), _VLLM),
    **dict.fromkeys(("tensor_model_parallel_size", "inference_engine_tensor_parallel_size"), _VLLM),
    **dict.fromkeys(("enforce_eager", "max_num_seqs", "max_num_batched_tokens"), _VLLM),
}
