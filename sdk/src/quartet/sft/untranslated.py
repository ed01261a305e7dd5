"""The arguments of TRL's SFTConfig and of transformers' TrainingArguments that have no key of a fine-tuning
(quartet.scripts.known)."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.scripts import known
from quartet.scripts.known import Known, alike

WITHOUT_EFFECT: Mapping[str, Known] = {
    **known.WITHOUT_EFFECT,
    **alike("the ranks of the trainer (num_processes) share one model by FSDP2, docs/ranks.md", fsdp=None),
    **alike(
        "rows are read once, before the first step, and drawn in an order that follows from seed",
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        dataset_num_proc=None,
        dataset_kwargs=None,
        remove_unused_columns=True,
        label_names=None,
        length_column_name="length",
        train_sampling_strategy="random",
        shuffle_dataset=False,
        data_seed=None,
        ignore_data_skip=False,
    ),
    **alike(
        "the trainer packs whole chats into micro-batches, and none sees another",
        padding_free=False,
        pad_to_multiple_of="auto",
        pad_token=None,
        eval_packing=None,
    ),
    **alike(
        "an evaluation measures all of eval_dataset, a batch at a time",
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
        "every step is in metrics.jsonl of output_dir, and in trainer.state.log_history",
        logging_strategy="steps",
        logging_steps=10,
        logging_first_step=False,
        include_num_input_tokens_seen="no",
    ),
    **alike(
        "the trainer chooses its arithmetic by device, docs/trainer.md", bf16=None, model_init_kwargs=None
    ),
    **alike(
        'Liger\'s kernels are used where they are installed; overrides = {"trainer": {"liger": "off"}}',
        use_liger_kernel=False,
    ),
    **alike(
        'there is overrides = {"trainer": {"optimizer_offload": True}}',
        activation_offloading=False,
    ),
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
    **alike("the loss is that of the tokens themselves; leave it 0", label_smoothing_factor=0.0),
    **alike("it measures from the first eval_steps on; leave it 0", eval_delay=0),
    **alike(
        "the last model is the fine-tuning's; quartet export --best writes the best that is kept",
        load_best_model_at_end=False,
    ),
    **alike("no code of a model folder is run; leave it out", trust_remote_code=False),
    **alike("routers are trained by the loss alone; leave it out", router_aux_loss_coef=None),
    **alike(
        "chats are rendered by the template of the model's folder, and end with its token; put it there",
        chat_template_path=None,
        eos_token=None,
    ),
    **alike('name the column "text"', dataset_text_field="text"),
    **alike("what is too long loses its end; leave it", truncation_mode="keep_start"),
}
