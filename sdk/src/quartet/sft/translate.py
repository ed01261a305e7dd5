"""From the arguments of a script to a fine-tuning: a pure function.

1. Each argument is translated, or is without effect here and said to be so, or refused in one sentence.
2. What a row is, and what of it is learned, is as in docs/algorithms.md, which says where TRL differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.run.sft import SftConfig
from quartet.scripts.adapter import lora_table, unnamed_modules
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.draft import Draft, validated
from quartet.scripts.models import Model
from quartet.scripts.reports import report
from quartet.scripts.schedule import (
    interval_of,
    is_share,
    optimizer_of,
    scheduler_of,
    settings_of,
    warmup_of,
)
from quartet.scripts.trainer_table import deployment, saving
from quartet.sft.arguments import SFTConfig

#: More than any model takes: nothing is cut.
NO_LIMIT = 1 << 30
#: Of loss_type, the same loss: over the mean of all tokens that are learned.
LOSSES = ("nll", "chunked_nll")
PACKINGS = ("bfd", "bfd_split", "wrapped")
#: What eval_strategy and save_strategy may be besides "no".
STRATEGIES = ("steps", "epoch")


@dataclass(frozen=True)
class Translation:
    """A fine-tuning, and what its arguments say that is no key of one, a sentence each."""

    config: SftConfig
    notes: tuple[str, ...]


def translate(
    args: SFTConfig,
    model: Model,
    data: Path,
    validation: Path | None = None,
    peft_config: Any = None,
    *,
    wandb_project: str | None = None,
) -> Translation:
    """The fine-tuning on files. `wandb_project` is where it is reported; None: it cannot be, and whoever
    found that says why. Raises ConfigError."""
    draft = Draft(args)
    args.refuse()
    by_logging = validation is not None and _interval_of(args) == "logging_steps"
    draft.notes += args.without_effect({"logging_steps": args.logging_steps} if by_logging else {})
    draft.put("model", model.folder, "model")
    draft.put("data", str(data), "train_dataset")
    if validation is not None:
        draft.put("validation", str(validation), "eval_dataset")
    _length(draft)
    _batch(draft, model)
    _learned(draft)
    _schedule(draft)
    optimizer_of(draft)
    _measured(draft, has_set=validation is not None)
    if (strategy := saving(draft, STRATEGIES)) != "no":
        _repeated(draft, "ckpt", strategy, "save_steps")
    if peft_config is not None:
        draft.table["lora"] = lora_table(peft_config)
        draft.notes += unnamed_modules(draft.table["lora"])
    deployment(draft)
    report(draft, wandb_project)
    return Translation(validated(draft, SftConfig, draft.table), tuple(draft.notes))


def _length(draft: Draft) -> None:
    """Puts when it ends. Raises ConfigError."""
    if draft.args.max_steps > 0:
        draft.put("max_steps", draft.count("max_steps"), "max_steps")
    else:
        draft.put("epochs", float(draft.args.num_train_epochs), "num_train_epochs")


def _batch(draft: Draft, model: Model) -> None:
    args = draft.args
    rows = math.prod(
        draft.count(name)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    )
    length = NO_LIMIT if args.max_length is None else draft.count("max_length", least=2)
    most = min(length, model.context or length)
    draft.put("max_tokens", most, "max_length")
    draft.put("overlong", "cut", "max_length")
    # There each pass ends with what is left of it.
    draft.put("short_batches", True, "per_device_train_batch_size")
    draft.put("batch_size", rows, "per_device_train_batch_size")
    if not args.packing:
        return
    if args.max_length is None:
        raise ConfigError("args.packing = True packs rows of max_length tokens; set args.max_length")
    if draft.chosen("packing_strategy", PACKINGS) != "bfd":
        draft.notes.append(
            f"args.packing_strategy = {args.packing_strategy!r} is taken as 'bfd': a row is of whole "
            "examples, and what is longer than max_length is cut"
        )
    draft.put("packing", "best_fit", "packing")


def _learned(draft: Draft) -> None:
    args = draft.args
    draft.chosen("loss_type", LOSSES)
    if args.completion_only_loss is False:
        draft.put("learn_prompts", True, "completion_only_loss")
    if not args.assistant_only_loss and "roles" not in args.overrides:
        draft.put("learns", "everything", "assistant_only_loss")


def _schedule(draft: Draft) -> None:
    """Puts learning rate and schedule. Raises ConfigError."""
    kind = scheduler_of(draft)
    draft.take("learning_rate", "learning_rate")
    settings_of(draft, lambda count, name: count, kind)
    name, asked = warmup_of(draft, kind)
    if is_share(name, asked):
        draft.put("warmup_ratio", asked, name)
    else:
        draft.put("warmup_steps", math.ceil(asked), name)


def _measured(draft: Draft, *, has_set: bool) -> None:
    """When eval_dataset is measured; always after the last step, for evaluate()."""
    args = draft.args
    strategy = draft.chosen("eval_strategy", ("no", *STRATEGIES))
    if not has_set:
        if strategy != "no" or args.eval_on_start:
            raise ConfigError(
                f"args.eval_strategy = {strategy!r} measures eval_dataset; give one to SFTTrainer"
            )
        return
    if strategy != "no":
        _repeated(draft, "eval", strategy, _interval_of(args))
    draft.take("eval_on_start", "eval.before")


def _interval_of(args: ArgumentList) -> str:
    """Which argument says after how many steps eval_dataset is measured."""
    return "logging_steps" if args.eval_steps is None and args.eval_strategy == "steps" else "eval_steps"


def _repeated(draft: Draft, table: str, strategy: str, name: str) -> None:
    """Puts what a table repeats: every pass, so many steps, or a share of all steps. Raises ConfigError."""
    if strategy == "epoch":
        draft.put(f"{table}.epochs", 1.0, name)
        return
    asked = interval_of(draft, name)
    if asked >= 1:
        draft.put(f"{table}.interval", int(asked), name)
    elif draft.args.max_steps > 0:
        draft.put(f"{table}.interval", math.ceil(draft.args.max_steps * asked), name)
    else:
        draft.put(f"{table}.epochs", draft.args.num_train_epochs * asked, name)
