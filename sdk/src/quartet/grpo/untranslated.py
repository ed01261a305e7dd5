"""The arguments of verifiers and transformers that have no key of a run (quartet.scripts.known)."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.scripts import known
from quartet.scripts.known import Known, alike

WITHOUT_EFFECT: Mapping[str, Known] = {
    **known.WITHOUT_EFFECT,
    **alike(
        "examples are served one by one by the environment host",
        max_data_workers=8,
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_prefetch_factor=None,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        remove_unused_columns=False,
        label_names=None,
        ignore_data_skip=False,
        group_by_length=False,
        length_column_name="length",
        train_sampling_strategy="random",
        data_seed=None,
    ),
    **alike(
        "the services are started by train(), and find each other",
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
        vllm_server_timeout=300.0,
    ),
    **alike("max_off_policy_steps (num_batches_ahead) bounds what waits", async_max_queue_size=None),
    **alike("weights travel as versions, tensor by tensor", ds3_gather_for_generation=True),
    **alike(
        "an evaluation is rollouts of the environment, max_concurrent of them at once",
        per_device_eval_batch_size=8,
        per_gpu_eval_batch_size=None,
        eval_accumulation_steps=None,
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        prediction_loss_only=False,
        include_inputs_for_metrics=False,
        include_for_metrics=[],
        batch_eval_metrics=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
        jit_mode_eval=False,
    ),
    **alike(
        "the ranks of the trainer (num_processes) share one model by FSDP2, docs/ranks.md",
        fsdp="",
        fsdp_min_num_params=0,
        fsdp_transformer_layer_cls_to_wrap=None,
        tpu_num_cores=None,
        tpu_metrics_debug=False,
        mp_parameters="",
    ),
    **alike(
        "the trainer chooses its arithmetic by device and bf16, docs/trainer.md",
        half_precision_backend="auto",
        fp16_backend="auto",
        fp16_opt_level="O1",
        use_ipex=False,
        use_mps_device=False,
        torchdynamo=None,
    ),
    **alike(
        "a state is whole, and an exported model is safetensors",
        save_safetensors=True,
    ),
    **alike(
        "a line is printed for each logged step; metrics.jsonl and logs/ of output_dir have the rest",
        logging_dir=None,
        include_tokens_per_second=False,
        include_num_input_tokens_seen=False,
        wandb_log_unique_prompts=False,
    ),
    **alike(
        "nothing is uploaded; 'hf upload' sends the folder of trainer.save_model",
        push_to_hub_model_id=None,
        push_to_hub_organization=None,
        push_to_hub_token=None,
    ),
    **alike(
        "GRPOTrainer did not read it either",
        do_train=False,
        do_eval=False,
        do_predict=False,
        past_index=-1,
        ray_scope="last",
        use_legacy_prediction_loop=False,
        label_smoothing_factor=0.0,
        model_init_kwargs=None,
        vllm_guided_decoding_regex=None,
        resume_from_checkpoint=None,
    ),
    **alike("max_steps says how long a run is", num_train_epochs=3.0),
    **alike("the trainer computes without dropout, but for that of an adapter", disable_dropout=False),
}

REFUSED: Mapping[str, Known] = {
    **known.REFUSED,
    **alike(
        "examples come in the order of seed; leave it True, or have the environment sort them",
        shuffle_dataset=True,
    ),
    **alike(
        "tokens that the environment wrote are never learned from; leave it True",
        mask_env_responses=True,
    ),
    **alike(
        "leave it False: mask_truncated_completions keeps cut rollouts out of the loss, "
        "and a rubric can give them 0",
        zero_truncated_completions=False,
    ),
    **alike("set per_device_train_batch_size", per_gpu_train_batch_size=None),
    **alike("set bf16 = True", fp16=False),
    **alike("set optim to adamw_torch or sgd", adafactor=False),
    **alike("evaluations begin at the first eval_steps; leave it 0", eval_delay=0),
    **alike(
        "the last model is the run's; quartet export --best writes the best that is kept",
        load_best_model_at_end=False,
    ),
}
