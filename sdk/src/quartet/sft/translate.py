"""From the arguments of a script to a fine-tuning: a pure function.

1. Each argument is translated, or is without effect here and said to be so, or refused in one sentence.
2. What a row is, and what of it is learned, is as in docs/algorithms.md, which says where TRL differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.draft import Draft, validated
from quartet.grpo.handles import Model, lora_table, unnamed_modules
from quartet.grpo.reports import report
from quartet.grpo.schedule import SCHEDULERS, optimizer_of, settings_of
from quartet.run.sft import SftConfig
from quartet.sft.arguments import SFTConfig
from quartet.sft.untranslated import REFUSED, WITHOUT_EFFECT

#: More than any model takes: nothing is cut.
NO_LIMIT = 1 << 30
#: The trainer keeps no more states of a run.
MAX_KEPT = 1000
#: Of loss_type, the same loss: over the mean of all tokens that are learned.
LOSSES = ("nll", "chunked_nll")


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
    _refuse(args)
    draft.notes += _unread(args)
    draft.put("model", model.folder, "model")
    draft.put("data", str(data), "train_dataset")
    if validation is not None:
        draft.put("validation", str(validation), "eval_dataset")
    steps = _length(draft)
    _batch(draft, model)
    _learned(draft)
    _schedule(draft, steps)
    optimizer_of(draft)
    _measured(draft, steps, has_set=validation is not None)
    _states(draft, steps)
    if peft_config is not None:
        draft.table["lora"] = lora_table(peft_config)
        draft.notes += unnamed_modules(draft.table["lora"])
    _trainer(draft)
    report(draft, wandb_project)
    return Translation(validated(draft, SftConfig, draft.table), tuple(draft.notes))


def _refuse(args: SFTConfig) -> None:
    for name, known in REFUSED.items():
        if (value := getattr(args, name)) != known.default:
            raise ConfigError(f"args.{name} = {value!r} is refused: {known.why}")


def _unread(args: SFTConfig) -> Sequence[str]:
    given = vars(args)
    return [
        f"args.{name} = {given[name]!r} is without effect: {known.why}"
        for name, known in WITHOUT_EFFECT.items()
        if name in given and given[name] != known.default
    ]


def _length(draft: Draft) -> int | None:
    """Puts when it ends; how many steps that are, where it says. Raises ConfigError."""
    if draft.args.max_steps > 0:
        draft.put("max_steps", draft.count("max_steps"), "max_steps")
        return draft.count("max_steps")
    draft.put("epochs", float(draft.args.num_train_epochs), "num_train_epochs")
    return None


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
    if not args.packing:
        draft.put("batch_size", rows, "per_device_train_batch_size")
        return
    if args.max_length is None:
        raise ConfigError("args.packing = True packs rows of max_length tokens; set args.max_length")
    draft.put("batch_tokens", rows * most, "per_device_train_batch_size")


def _learned(draft: Draft) -> None:
    args = draft.args
    draft.chosen("loss_type", LOSSES)
    if args.completion_only_loss is False:
        raise ConfigError(
            "args.completion_only_loss = False is refused: of a prompt with its completion the completion is "
            'learned; write both as one {"text"}, or as {"messages"}'
        )
    if not args.assistant_only_loss:
        draft.notes.append(
            'args.assistant_only_loss = False: of {"messages"} the assistant\'s alone are learned here; '
            'overrides = {"roles": [...]} names others, and True says that it is meant'
        )


def _schedule(draft: Draft, steps: int | None) -> None:
    """Puts learning rate and schedule. Raises ConfigError."""
    args = draft.args
    kind = draft.chosen("lr_scheduler_type", tuple(SCHEDULERS))
    draft.put("lr_scheduler", SCHEDULERS[kind], "lr_scheduler_type")
    draft.take("learning_rate", "learning_rate")
    settings_of(draft, lambda count, name: count, kind)
    name = "warmup_steps" if args.warmup_steps else "warmup_ratio"
    asked = getattr(args, name)
    if asked < 0 or (name == "warmup_ratio" and asked > 1):
        raise ConfigError(f"args.{name} = {asked!r} is refused: should be 0 or more, a ratio at most 1")
    warmup = _of_all(name, asked, steps) if name == "warmup_ratio" or 0 < asked < 1 else math.ceil(asked)
    if kind == "constant" and warmup:
        draft.notes.append(
            f"args.{name} = {asked} is without effect, as there: lr_scheduler_type = 'constant' has no "
            "warm-up; write 'constant_with_warmup'"
        )
        warmup = 0
    draft.put("warmup_steps", warmup, name)


def _of_all(name: str, share: float, steps: int | None) -> int:
    """A share of all steps. Raises ConfigError where nobody knows how many these are yet."""
    if share and steps is None:
        raise ConfigError(
            f"args.{name} = {share!r} is a share of the steps, which num_train_epochs says only once the "
            "data are read; give a number of steps, or set args.max_steps"
        )
    return math.ceil(share * (steps or 0))


def _every(draft: Draft, name: str, steps: int | None) -> int:
    value = getattr(draft.args, name)
    if isinstance(value, float) and 0 < value < 1:
        return max(1, _of_all(name, value, steps))
    if value is None or value < 1 or value != int(value):
        raise ConfigError(
            f"args.{name} = {value!r} is refused: should be a number of steps, or a share below 1"
        )
    return int(value)


def _measured(draft: Draft, steps: int | None, *, has_set: bool) -> None:
    """When eval_dataset is measured; always after the last step, for evaluate()."""
    args = draft.args
    strategy = draft.chosen("eval_strategy", ("no", "steps"))
    if not has_set:
        if strategy != "no" or args.eval_on_start:
            raise ConfigError(
                f"args.eval_strategy = {strategy!r} measures eval_dataset; give one to SFTTrainer"
            )
        return
    # Without a number there it is that of logging_steps.
    name = "eval_steps" if args.eval_steps is not None else "logging_steps"
    draft.put("eval.interval", _every(draft, name, steps) if strategy == "steps" else 0, "eval_steps")
    draft.take("eval_on_start", "eval.before")


def _states(draft: Draft, steps: int | None) -> None:
    if draft.chosen("save_strategy", ("no", "steps")) == "no":
        draft.notes.append(
            "args.save_strategy = 'no' is without effect: the trainer keeps the last states that it goes on "
            "from when it dies, and the model is exported once, at the end"
        )
        return
    draft.put("ckpt.interval", _every(draft, "save_steps", steps), "save_steps")
    # Without a limit every one is kept, as there.
    draft.put("ckpt.keep_last", draft.args.save_total_limit or MAX_KEPT, "save_total_limit")


def _trainer(draft: Draft) -> None:
    args = draft.args
    if args.num_processes > 1:
        draft.take("num_processes", "trainer.ranks")
    again = bool(args.gradient_checkpointing or args.activation_checkpointing)
    draft.put("trainer.gradient_checkpointing", again, "gradient_checkpointing")
    if args.use_cpu:
        draft.put("trainer.device", "cpu", "use_cpu")
