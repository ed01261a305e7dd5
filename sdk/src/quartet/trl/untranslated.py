"""The arguments of TRL's GRPOConfig and of transformers' TrainingArguments that have no key of a run
(quartet.scripts.known)."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.scripts import known
from quartet.scripts.known import Known, alike

WITHOUT_EFFECT: Mapping[str, Known] = {
    **known.WITHOUT_EFFECT,
    **alike("the ranks of the trainer (num_processes) share one model by FSDP2, docs/ranks.md", fsdp=None),
    **alike(
        "prompts are read one by one, as their rollouts begin, in an order that follows from seed",
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        label_names=None,
        length_column_name="length",
        train_sampling_strategy="random",
        data_seed=None,
        ignore_data_skip=False,
    ),
    **alike("the trainer packs rollouts, and pads as its kernels want it", pad_to_multiple_of="auto"),
    **alike(
        'train() starts an engine, and finds it; overrides = {"inference": {...}} has its settings '
        "(docs/inference.md)",
        cache_implementation=None,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
        vllm_enable_sleep_mode=False,
        vllm_server_base_url=None,
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
        vllm_server_timeout=240.0,
        vllm_group_port=51216,
    ),
    **alike("weights travel as versions, tensor by tensor", ds3_gather_for_generation=True),
    **alike(
        "an evaluation is rollouts of eval_dataset, max_concurrent of them at once",
        per_device_eval_batch_size=8,
        eval_accumulation_steps=None,
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        prediction_loss_only=False,
        include_for_metrics=[],
        batch_eval_metrics=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
    ),
    **alike(
        "rollouts/ of output_dir has conversations of every step",
        log_multimodal=True,
        log_unique_prompts=False,
        include_num_input_tokens_seen="no",
    ),
    **alike(
        'Liger\'s kernels are used where they are installed; overrides = {"trainer": {"liger": "off"}}',
        use_liger_kernel=False,
    ),
    **alike("the trainer computes without dropout, but for that of an adapter", disable_dropout=False),
    **alike("log-probabilities are computed in float32 of the head's products", cast_lm_head_to_fp32=False),
    **alike("GRPOTrainer does not read it either", label_smoothing_factor=0.0),
    **alike(
        "the script says what is done by calling it",
        do_train=False,
        do_eval=False,
        do_predict=False,
        resume_from_checkpoint=None,
    ),
}

REFUSED: Mapping[str, Known] = {
    **known.REFUSED,
    **alike("set bf16, or leave it to the device", fp16=False),
    **alike(
        "prompts come in an order that follows from seed; leave it True",
        shuffle_dataset=True,
    ),
    **alike("reward functions are given every column; leave it False", remove_unused_columns=False),
    **alike("answers are not bound to a grammar; leave it out", vllm_structured_outputs_regex=None),
    **alike("it measures from the first eval_steps on; leave it 0", eval_delay=0),
    **alike(
        "the last model is the run's; quartet export --best writes the best that is kept",
        load_best_model_at_end=False,
    ),
    **alike("no code of a model folder is run; leave it out", trust_remote_code=False),
    **alike(
        "nothing is uploaded; rollouts/ of output_dir has the conversations", log_completions_hub_repo=None
    ),
}
