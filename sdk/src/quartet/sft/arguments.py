"""The arguments of an SFTTrainer script: those of TRL's SFTConfig 1.16, with its defaults, and of the
TrainingArguments of transformers under it.

1. Those that this class declares are translated (translate.py), those of untranslated.py are known, and how
   they are set is quartet.scripts.argument_list's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.scripts.argument_list import ArgumentList
from quartet.sft import untranslated


class SFTConfig(ArgumentList):
    """How to train, by the names of TRL. `overrides` and `num_processes` are Quartet's own."""

    WITHOUT_EFFECT = untranslated.WITHOUT_EFFECT
    REFUSED = untranslated.REFUSED

    # --- where
    output_dir: str = "trainer_output"
    run_name: str | None = None

    # --- batches: rows of a step = per device * accumulation * processes
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    #: Ranks of the trainer; what `accelerate launch --num-processes` said.
    num_processes: int = 1
    #: A row is as many examples as max_length has room for.
    packing: bool = False
    packing_strategy: str = "bfd"
    #: Tokens; what is longer is cut.
    max_length: int | None = 1024

    # --- what is learned
    loss_type: str = "nll"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False

    # --- schedule and optimizer
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 2e-5
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

    # --- saved states
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None

    # --- what is said
    report_to: str | Sequence[str] | None = "none"
    project: str = "huggingface"

    # --- the trainer's machine
    gradient_checkpointing: bool | None = True
    activation_checkpointing: bool | None = None
    use_cpu: bool = False

    #: Keys of a fine-tuning (docs/algorithms.md), laid over what the arguments say:
    #: {"trainer": {"threads": 2}}.
    overrides: Mapping[str, Any]
