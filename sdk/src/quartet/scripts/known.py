"""Arguments that have no key here: what is said of each that a script sets.

Without effect is how fast, how much is printed, where something is kept: what is trained is the same without
it. Refused is another value than the default that would be another training, or something that a script then
waits for. What callbacks read has an effect where there are some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """An argument with its default, and why another value does nothing, or is refused."""

    default: Any
    why: str


def alike(why: str, **defaults: Any) -> dict[str, Known]:
    """Arguments with their defaults, of all of which that is said."""
    return {name: Known(default, why) for name, default in defaults.items()}


#: Of transformers' TrainingArguments, what is without effect whatever is trained.
WITHOUT_EFFECT: Mapping[str, Known] = {
    **alike(
        "the ranks of the trainer (num_processes) share one model by FSDP2, docs/ranks.md",
        deepspeed=None,
        fsdp_config=None,
        accelerator_config=None,
        parallelism_config=None,
        ddp_backend=None,
        ddp_find_unused_parameters=None,
        ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=None,
        ddp_static_graph=None,
        ddp_timeout=1800,
        local_rank=-1,
        average_tokens_across_devices=True,
    ),
    **alike(
        "the trainer chooses its arithmetic by device and bf16, docs/trainer.md",
        tf32=None,
        use_cache=False,
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
        torch_empty_cache_steps=None,
        liger_kernel_config=None,
        gradient_checkpointing_kwargs=None,
        activation_checkpointing_kwargs=None,
        auto_find_batch_size=False,
    ),
    **alike("equal calls of the trainer give equal bits anyway", full_determinism=False),
    **alike(
        "a state is whole, and an exported model is safetensors",
        save_on_each_node=False,
        save_only_model=False,
        restore_callback_states_from_checkpoint=False,
        enable_jit_checkpoint=False,
    ),
    **alike(
        "a line is printed for each logged step; metrics.jsonl and logs/ of output_dir have the rest",
        log_level="passive",
        log_level_replica="warning",
        log_on_each_node=True,
        logging_nan_inf_filter=True,
        disable_tqdm=None,
        skip_memory_metrics=True,
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=None,
        debug="",
    ),
    **alike(
        "nothing is uploaded; 'hf upload' sends the folder of trainer.save_model",
        hub_model_id=None,
        hub_strategy="every_save",
        hub_token=None,
        hub_private_repo=None,
        hub_always_push=False,
        hub_revision=None,
    ),
}

#: What callbacks read, of evaluations.
FOR_CALLBACKS: Mapping[str, Known] = alike(
    "callbacks such as EarlyStoppingCallback read it, and none is given",
    metric_for_best_model=None,
    greater_is_better=None,
)

#: And what is refused.
REFUSED: Mapping[str, Known] = {
    **alike(
        "the optimizer has no such settings here; leave it out",
        optim_args=None,
        optim_target_modules=None,
        neftune_noise_alpha=None,
    ),
    **alike(
        "nothing is uploaded; leave it False, and send the folder of trainer.save_model with 'hf upload'",
        push_to_hub=False,
    ),
}

_DEVICE = "the trainer finds its device; leave it out"
_OLD = "transformers 5 has it no more, and it changes nothing here; leave it out"
#: Arguments of transformers before its release 5, and what to write instead.
EARLIER: Mapping[str, str] = {
    "logging_dir": 'metrics are in output_dir, event files too with report_to = "tensorboard"; leave it out',
    "no_cuda": "it is called use_cpu",
    "overwrite_output_dir": "nothing is overwritten; delete that folder, or name another output_dir",
    "save_safetensors": "models are always written as safetensors; leave it out",
    "group_by_length": "the trainer packs by length what a step has; leave it out",
    "include_tokens_per_second": "each line that is printed has tokens per second; leave it out",
    "adafactor": 'set optim, to "adamw_torch" or "sgd"',
    "per_gpu_train_batch_size": "it is called per_device_train_batch_size",
    **dict.fromkeys(("use_mps_device", "tpu_num_cores", "use_ipex"), _DEVICE),
    **dict.fromkeys(
        ("half_precision_backend", "fp16_backend", "fp16_opt_level"), "set bf16, or leave it to the device"
    ),
    **dict.fromkeys(
        (
            *("dispatch_batches", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
            *("jit_mode_eval", "mp_parameters", "past_index", "ray_scope", "split_batches", "torchdynamo"),
            *("tpu_metrics_debug", "use_legacy_prediction_loop"),
        ),
        _OLD,
    ),
    **dict.fromkeys(
        ("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
        WITHOUT_EFFECT["hub_model_id"].why,
    ),
}
