"""From the arguments of a script of TRL to a run: a pure function.

1. Each argument is translated, or is without effect here and said to be so, or refused in one sentence.
2. The run computes what TRL 1.16 computes of the same completions: docs/trl.md has each formula, and says
   where it differs.
3. TRL counts optimizer steps, a run counts batches: `steps_per_batch` of the former are one of the latter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.overrides import overridden
from quartet.grpo.schedule import Steps, schedule
from quartet.grpo.translate import ALL_EXAMPLES, Logging, Translation
from quartet.scripts.adapter import lora_table, unnamed_modules
from quartet.scripts.draft import Draft
from quartet.scripts.models import PLACEMENT, Model
from quartet.scripts.reports import report
from quartet.scripts.schedule import optimizer_of
from quartet.scripts.trainer_table import deployment, saving
from quartet.trl.arguments import GRPOConfig
from quartet.trl.batches import Batches, batches
from quartet.trl.loss import algorithm
from quartet.trl.sampling import check_calling, engine, sampling

#: The environment host plays it by itself (docs/rewards.md).
ENVIRONMENT = "reward-service"
#: What eval_strategy, save_strategy and logging_strategy may be besides "no".
STRATEGIES = ("steps", "epoch")
#: Of model_init_kwargs, what scripts of TRL itself say, and the services do.
LOADED_SO = (("trust_remote_code", False), ("revision", "main"))
_GIVEN = {
    "model": "give GRPOTrainer another model",
    "env": "it is made of reward_funcs and train_dataset; args.rollout_timeout is its time",
}


@dataclass(frozen=True)
class Data:
    """What a script has of prompts, and where it serves them."""

    train: int
    #: 0: there are none.
    evaluation: int
    address: str
    #: Of the reward functions, by name.
    weights: Mapping[str, float] = field(default_factory=dict)
    has_tools: bool = False


@dataclass(frozen=True)
class OfTrl(Translation):
    """A run, and how many of its optimizer steps one pass over the prompts is."""

    steps_of_epoch: int


def translate(
    args: GRPOConfig,
    model: Model,
    data: Data,
    peft_config: Any = None,
    *,
    context: int | None = None,
    wandb_project: str | None = None,
) -> OfTrl:
    """The run. `context` is the longest sequence of the model, `wandb_project` where it is reported; None: it
    cannot be, and whoever found that says why. Raises ConfigError."""
    draft = Draft(args)
    args.refuse()
    draft.notes += args.without_effect()
    draft.put("model", model.folder, "model")
    draft.table["env"] = [
        {"id": ENVIRONMENT, "args": {"address": data.address}, "timeout_seconds": args.rollout_timeout}
    ]
    draft.names["env.0.timeout_seconds"] = "rollout_timeout"
    # The next completions are sampled by the policy that has learned from these.
    draft.put("max_off_policy_steps", 0, "num_iterations")
    counted = batches(draft)
    steps, of_epoch = _steps(draft, counted, data.train)
    schedule(draft, steps)
    optimizer_of(draft)
    if args.bf16 is False:
        draft.put("compute_dtype", "float32", "bf16")
    if args.max_completion_length is not None:
        # What a device held at once: completions, and as much for their prompts.
        held = 2 * args.per_device_train_batch_size * draft.count("max_completion_length")
        draft.put("microbatch_tokens", held, "per_device_train_batch_size")
    sampling(draft)
    check_calling(draft, has_tools=data.has_tools)
    engine(draft, context)
    algorithm(draft, data.weights, adapted=peft_config is not None)
    if peft_config is not None:
        draft.table["lora"] = lora_table(peft_config)
        draft.notes += unnamed_modules(draft.table["lora"])
    _evaluation(draft, steps, of_epoch, data.evaluation)
    if (strategy := saving(draft, STRATEGIES)) != "no":
        draft.put("ckpt.interval", _every(steps, strategy, "save_steps", of_epoch), "save_steps")
    _initialised(draft)
    deployment(draft)
    logging = _logging(draft, steps, of_epoch)
    report(draft, wandb_project, "the services speak Prometheus, ")
    if "wandb" in draft.table and not args.log_completions:
        draft.put("wandb.completions", 0, "log_completions")
    config = overridden(draft, _GIVEN)
    return OfTrl(config, tuple(draft.notes), counted.steps_per_batch, logging, of_epoch)


def _steps(draft: Draft, counted: Batches, prompts: int) -> tuple[Steps, int]:
    """As many as there are, and those of an epoch. Raises ConfigError."""
    if draft.args.max_steps > 0:
        # A pass that comes to no step is no pass; what it counts is told alone.
        of_epoch = counted.steps_of_epoch(max(prompts, counted.prompts))
        return Steps(draft, counted.steps_per_batch), of_epoch
    epochs = draft.args.num_train_epochs
    if epochs <= 0:
        raise ConfigError(f"args.num_train_epochs = {epochs!r} is refused: should be above 0")
    of_epochs = counted.steps_of_epochs(epochs, prompts)
    return Steps(draft, counted.steps_per_batch, of_epochs), counted.steps_of_epoch(prompts)


def _every(steps: Steps, strategy: str, name: str, of_epoch: int, fallback: str | None = None) -> int:
    """Batches from one to the next of what is repeated by steps or epochs. Raises ConfigError."""
    return steps.batches(of_epoch, name) if strategy == "epoch" else steps.every(name, fallback)


def _evaluation(draft: Draft, steps: Steps, of_epoch: int, prompts: int) -> None:
    args = draft.args
    interval = 0
    if (strategy := draft.chosen("eval_strategy", ("no", *STRATEGIES))) != "no":
        interval = _every(steps, strategy, "eval_steps", of_epoch, "logging_steps")
    wanted = bool(interval) or args.eval_on_start
    if wanted and not prompts:
        name = "eval_strategy" if interval else "eval_on_start"
        raise ConfigError(
            f"args.{name} = {getattr(args, name)!r} measures eval_dataset; give one to GRPOTrainer"
        )
    draft.put("eval.num_examples", ALL_EXAMPLES if wanted else 0, "eval_strategy")
    draft.put("eval.interval", interval, "eval_steps")
    draft.take("eval_on_start", "eval.before")
    # As transformers does since its release 5, whether one is due or not.
    draft.put("eval.after", bool(interval), "eval_strategy")
    name = "num_generations" if args.num_generations_eval is None else "num_generations_eval"
    draft.put("eval.rollouts_per_example", draft.count(name), name)


def _initialised(draft: Draft) -> None:
    """How TRL loads the model, of which the services decide what is about its place. Raises ConfigError."""
    for name, value in (draft.args.model_init_kwargs or {}).items():
        if name in PLACEMENT or (name, value) in LOADED_SO:
            draft.notes.append(
                f"args.model_init_kwargs: {name} = {value!r} is without effect: the trainer places the model "
                "itself"
            )
            continue
        raise ConfigError(
            f"args.model_init_kwargs: {name} = {value!r} is refused: the services load the model as its "
            "folder says; make a folder of that model, and name it"
        )


def _logging(draft: Draft, steps: Steps, of_epoch: int) -> Logging:
    args = draft.args
    if (strategy := draft.chosen("logging_strategy", ("no", *STRATEGIES))) == "no":
        return Logging(0)
    every = _every(steps, strategy, "logging_steps", of_epoch)
    if not args.log_completions:
        return Logging(every, args.logging_first_step)
    completions = draft.table["batch_size"]
    if args.num_completions_to_print is not None:
        completions = min(completions, draft.count("num_completions_to_print", 0))
    groups = draft.table["batch_size"] // draft.table["rollouts_per_example"]
    draft.put("messages_of_members", max(1, math.ceil(completions / groups)), "num_completions_to_print")
    return Logging(every, args.logging_first_step, completions)
