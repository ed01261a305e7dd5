"""The arguments of a script of TRL's GRPOTrainer: those of its GRPOConfig 1.16, with its defaults, and of the
TrainingArguments of transformers under it.

1. Those that this class declares are translated (translate.py), those of untranslated.py are known, and how
   they are set is quartet.scripts.argument_list's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.scripts.argument_list import ArgumentList
from quartet.trl import untranslated
from quartet.trl.elsewhere import BEFORE


class GRPOConfig(ArgumentList):
    """What to train, by the names of TRL. `overrides`, `num_processes` and `rollout_timeout` are Quartet's
    own, `overwrite_output_dir` and `warmup_ratio` of earlier transformers."""

    WITHOUT_EFFECT = untranslated.WITHOUT_EFFECT
    REFUSED = untranslated.REFUSED
    ELSEWHERE = BEFORE
    PAGE = "docs/trl.md"

    # --- where
    output_dir: str = "trainer_output"
    run_name: str | None = None
    #: Delete what output_dir holds of an earlier run.
    overwrite_output_dir: bool = False

    # --- batches: completions of a step = per device * accumulation * processes
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    #: Ranks of the trainer; what `accelerate launch --num-processes` said.
    num_processes: int = 1
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1

    # --- completions
    max_completion_length: int | None = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_tool_calling_iterations: int | None = None
    #: Seconds that a completion may take, and as many again the rewards of its group; then it fails.
    rollout_timeout: float = 600.0

    # --- vLLM
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None

    # --- rewards
    reward_weights: Sequence[float] | None = None
    scale_rewards: bool | str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"

    # --- loss
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    mask_truncated_completions: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    router_aux_loss_coef: float | None = None

    # --- schedule and optimizer
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    optim: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 42

    # --- measurements of eval_dataset
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    num_generations_eval: int | None = None

    # --- saved states
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None

    # --- what is said
    logging_strategy: str = "steps"
    logging_steps: float = 10
    logging_first_step: bool = False
    log_completions: bool = False
    num_completions_to_print: int | None = None
    report_to: str | Sequence[str] | None = "none"
    project: str = "huggingface"

    # --- the trainer's machine
    model_init_kwargs: Mapping[str, Any] | None = None
    bf16: bool | None = None
    gradient_checkpointing: bool | None = True
    activation_checkpointing: bool | None = None
    use_cpu: bool = False

    #: Keys of a run (docs/runs.md), laid over what the arguments say: {"trainer": {"threads": 2}}.
    overrides: Mapping[str, Any]
