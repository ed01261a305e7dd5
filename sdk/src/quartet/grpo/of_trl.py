"""What TRL's GRPOTrainer and GRPOConfig take beside what Verifiers' do, and what to write instead.

1. None of these is an argument here: each is refused, by a sentence that says what is.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENVIRONMENT = (
    "tasks and rewards are an environment's here, env = vf.load_environment(...); a script with reward "
    "functions and a data set trains with 'from quartet.trl import GRPOConfig, GRPOTrainer' (docs/trl.md)"
)
_TURNS = "tools and turns are an environment's: 'quartet env init NAME', with --kind tool or --kind turns"
#: Arguments of GRPOTrainer.
TRAINER: Mapping[str, str] = {
    **dict.fromkeys(("reward_funcs", "train_dataset", "eval_dataset"), _ENVIRONMENT),
    **dict.fromkeys(("tools", "rollout_func"), _TURNS),
    "environment_factory": (
        f"{_TURNS}; a script with one trains with 'from quartet.trl import GRPOConfig, GRPOTrainer' "
        "(docs/trl.md)"
    ),
}

_ENGINE = (
    'train() starts an engine; overrides = {"inference": {"engine": "vllm"}} chooses vLLM, whose arguments '
    "are a table inference.vllm.args (docs/inference.md)"
)
_CORRECTED = (
    "what lies between sampler and trainer is weighed by algorithm.correction (docs/algorithms.md), a key of "
    "overrides"
)
_ADAPTIVE_ENTROPY = (
    'give overrides = {"algorithm": {"target_entropy": 0.2}}, which adapts entropy_coef within 0 and 1, in '
    "steps of entropy_coef_delta"
)
_SAPO = (
    'give overrides = {"algorithm": {"preset": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}} in the '
    "place of loss_type"
)
_VESPO = (
    'give overrides = {"algorithm": {"preset": "vespo", "kernel": {"k_positive": 2.0, "lambda_positive": '
    '3.0, "k_negative": 3.0, "lambda_negative": 2.0}}} in the place of loss_type'
)
_OF_THE_RUBRIC = "weights of rewards are those of the environment's rubric"
#: Arguments of GRPOConfig.
CONFIG: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"),
            *("vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
            *("vllm_tensor_parallel_size", "use_transformers_continuous_batching", "use_transformers_paged"),
        ),
        _ENGINE,
    ),
    **dict.fromkeys(
        (
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
            "vllm_importance_sampling_cap",
        ),
        _CORRECTED,
    ),
    "top_entropy_quantile": 'give overrides = {"algorithm": {"top_entropy_quantile": 0.2}}',
    **dict.fromkeys(
        (
            *("use_adaptive_entropy", "entropy_target", "entropy_coef_delta", "entropy_coef_min"),
            "entropy_coef_max",
        ),
        _ADAPTIVE_ENTROPY,
    ),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), _VESPO),
    **dict.fromkeys(("reward_weights", "multi_objective_aggregation"), _OF_THE_RUBRIC),
    "importance_sampling_level": 'of samples: give overrides = {"algorithm": {"ratio_level": "sequence"}}',
    "sapo_temperature_pos": _SAPO,
    "sapo_temperature_neg": _SAPO,
    "off_policy_mask_threshold": 'give overrides = {"algorithm": {"off_policy_mask": 0.1}}',
    "use_bias_correction_kl": 'give overrides = {"algorithm": {"kl_weighted": True}}',
    "entropy_coef": 'give overrides = {"algorithm": {"entropy_coef": 0.01}}',
    "chat_template_kwargs": 'give overrides = {"sampling": {"template_settings": {...}}}',
    "generation_kwargs": 'give overrides = {"sampling": {"min_tokens": 16}}; docs/runs.md has its other keys',
    "max_tool_calling_iterations": _TURNS,
}
