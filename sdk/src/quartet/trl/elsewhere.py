"""What TRL has beside, in its module, its trainer's arguments and earlier releases of its config, and what to
write instead.

1. None of these is here: each is refused, by a sentence that says what is.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.scripts.argument_list import VALUE
from quartet.scripts.callbacks import ELSEWHERE as OF_PACKAGES
from quartet.scripts.trainer import OF_TRANSFORMERS

_RLOO = (
    'give GRPOTrainer overrides = {"algorithm": {"preset": "rloo"}}, with the arguments of GRPOConfig '
    "(docs/algorithms.md)"
)
_PREFERENCES = (
    "nothing learns from pairs of answers here; GRPOTrainer takes what prefers one to the other as a reward "
    "function, SFTTrainer the answers that were chosen"
)
_DISTILLED = (
    'give GRPOTrainer overrides = {"algorithm": {"preset": "opd", "reference": {"model": "TEACHER"}}}: '
    "on-policy distillation (docs/algorithms.md)"
)
_VALUES = "there is no model of values here; GRPOTrainer takes the same reward as a function, and needs none"
_PARSED = (
    "it reads classes of TRL; read what you need with argparse or from a file, and give it by name: "
    "GRPOConfig(**values)"
)
_REWARDS = "train it with TRL, and give GRPOTrainer a function that asks it as reward_funcs"
_LOADED = (
    "the services load and place the model; name its folder, and give an adapter as "
    "peft_config = LoraConfig(...)"
)
#: Names of its module.
OF_TRL: Mapping[str, str] = {
    "RLOOTrainer": _RLOO,
    "RLOOConfig": _RLOO,
    **dict.fromkeys(
        (
            *("DPOTrainer", "DPOConfig", "KTOTrainer", "KTOConfig", "ORPOTrainer", "ORPOConfig"),
            *("CPOTrainer", "CPOConfig", "BCOTrainer", "BCOConfig", "OnlineDPOTrainer", "OnlineDPOConfig"),
            *("NashMDTrainer", "NashMDConfig", "XPOTrainer", "XPOConfig"),
        ),
        _PREFERENCES,
    ),
    **dict.fromkeys(
        (
            *("DistillationTrainer", "DistillationConfig", "GKDTrainer", "GKDConfig"),
            *("MiniLLMTrainer", "MiniLLMConfig"),
        ),
        _DISTILLED,
    ),
    **dict.fromkeys(("PPOTrainer", "PPOConfig"), _VALUES),
    **dict.fromkeys(("RewardTrainer", "RewardConfig", "PRMTrainer", "PRMConfig"), _REWARDS),
    **dict.fromkeys(("TrlParser", "ScriptArguments", "ModelConfig", "DatasetMixtureConfig"), _PARSED),
    **dict.fromkeys(
        ("get_peft_config", "get_quantization_config", "get_kbit_device_map", "create_reference_model"),
        _LOADED,
    ),
    **dict.fromkeys(
        (
            *("LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WinRateCallback"),
            *("BEMACallback", "WeaveCallback"),
        ),
        OF_PACKAGES["trl"],
    ),
    **dict.fromkeys(
        (
            *("rewards", "get_dataset", "apply_chat_template", "extract_prompt", "is_conversational"),
            *("maybe_apply_chat_template", "maybe_extract_prompt", "clone_chat_template"),
        ),
        "it is TRL's own, and made for data: import it from there",
    ),
}

_TURNS = (
    "a completion has turns here by tools = [...] and environment_factory; other turns are an environment's: "
    "'quartet env init NAME --kind tool' writes one, and quartet.grpo's GRPOTrainer trains on it "
    "(docs/python.md)"
)
#: Arguments and attributes of its trainer.
TRAINER: Mapping[str, str] = {
    **OF_TRANSFORMERS,
    "rollout_func": _TURNS,
    "quantization_config": "weights are trained as they are in the model's folder; leave it out",
    "ref_model": "it is the model as it begins, or algorithm.reference among args.overrides",
    **dict.fromkeys(
        ("vllm_generation", "model_wrapped", "create_model_card"),
        "the model is in another process; leave it out",
    ),
    **dict.fromkeys(
        ("get_train_dataloader", "get_eval_dataloader", "compute_loss", "training_step"),
        'the training loop is in another process; overrides = {"algorithm": {...}} says what is computed',
    ),
}

#: Arguments of GRPOConfig in earlier releases, and of others, that are called otherwise.
BEFORE: Mapping[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "it is called max_completion_length"),
    "max_prompt_length": (
        f'prompts are given whole, as by TRL 1.16; overrides = {{"max_prompt_tokens": {VALUE}}} leaves out '
        "those that are longer"
    ),
    "vllm_guided_decoding_regex": "answers are not bound to a grammar; leave it out",
    "wandb_log_unique_prompts": "it is called log_unique_prompts now; leave it out",
    **dict.fromkeys(
        ("vllm_device", "vllm_dtype", "vllm_init_kwargs", "vllm_sleep_level"),
        'train() starts the engine; its settings are those of overrides = {"inference": {...}} '
        "(docs/inference.md)",
    ),
    "kl_coef": "it is called beta",
    "epsilon_low": "it is called epsilon",
    "ref_model_init_kwargs": "the reference is loaded as the model is; leave it out",
}
