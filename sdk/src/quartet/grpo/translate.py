"""From the arguments of a script to a run: a pure function.

1. Each argument is translated, or is without effect here and said to be so, or refused in one sentence.
2. The run computes what verifiers 0.1.3 computed from the same rollouts: docs/python.md has each formula, and
   says where it differs.
3. verifiers counts optimizer steps, a run counts batches: `steps_per_batch` of the former are one of the
   latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.arguments import GRPO_DEFAULTS, GRPOConfig
from quartet.grpo.environments import Environment
from quartet.grpo.overrides import overridden
from quartet.grpo.schedule import Steps, optimizer_keys, schedule
from quartet.run.config import RunConfig
from quartet.run.presets import PRESETS
from quartet.scripts.adapter import lora_table, unnamed_modules
from quartet.scripts.draft import Draft, Table
from quartet.scripts.models import Model
from quartet.scripts.reports import report
from quartet.scripts.trainer_table import deployment, saving

#: loss_type to algorithm.aggregation.
AGGREGATIONS = {"grpo": "sequence", "bnpo": "token", "dr_grpo": "constant"}
#: More than any environment has to evaluate on; an evaluation takes what there is.
ALL_EXAMPLES = 1_000_000
#: Of a loss_type that is a preset here.
_AS_PRESETS = {
    name: f'give overrides = {{"algorithm": {{"preset": "{name}"}}}} in its place' for name in PRESETS
}


@dataclass(frozen=True)
class Logging:
    """Which batches a line is printed of, and a row of the history made."""

    #: Batches from one to the next; 0: none.
    every: int
    first: bool = False
    #: Conversations printed with each line.
    completions: int = 0

    def due(self, batch: int) -> bool:
        """Whether after this one, counted from 1."""
        return bool(self.every) and (batch % self.every == 0 or (self.first and batch == 1))


@dataclass(frozen=True)
class Translation:
    """A run, and what its arguments say that is no key of one."""

    config: RunConfig
    #: What is without effect, or other than there: a sentence each.
    notes: tuple[str, ...]
    steps_per_batch: int
    logging: Logging


def translate(
    args: GRPOConfig,
    model: Model,
    environments: Sequence[Environment],
    peft_config: Any = None,
    *,
    context: int | None = None,
    wandb_project: str | None = None,
) -> Translation:
    """The run. `context` is the longest sequence of the model, `wandb_project` where it is reported; None: it
    cannot be, and whoever found that says why. Raises ConfigError."""
    draft = Draft(args)
    args.refuse()
    # What grpo_defaults sets nobody asked for.
    draft.notes += args.without_effect(GRPO_DEFAULTS)
    if model.unread:
        draft.notes.append(
            f"model_kwargs {', '.join(model.unread)}: without effect, the trainer places the model itself"
        )
    draft.put("model", model.folder, "model")
    draft.table["env"] = [_environment(one, args) for one in environments]
    for at in range(len(environments)):
        draft.names[f"env.{at}.timeout_seconds"] = "async_generation_timeout"
    steps_per_batch = _batch(draft)
    steps = Steps(draft, steps_per_batch)
    schedule(draft, steps)
    optimizer_keys(draft)
    length = _lengths(draft, context)
    _sampling(draft)
    _algorithm(draft, length, adapted=peft_config is not None)
    if peft_config is not None:
        draft.table["lora"] = lora_table(peft_config)
        draft.notes += unnamed_modules(draft.table["lora"])
    _evaluation(draft, steps)
    _states(draft, steps)
    _services(draft, model, environments)
    logging = _logging(draft, steps)
    report(draft, wandb_project, "the services speak Prometheus, ")
    if "wandb" in draft.table and not args.log_completions:
        draft.put("wandb.completions", 0, "log_completions")
    return Translation(overridden(draft), tuple(draft.notes), steps_per_batch, logging)


def _environment(environment: Environment, args: GRPOConfig) -> Table:
    table = {
        "id": environment.id,
        "args": dict(environment.args),
        "weight": environment.weight,
        # There it ended the run where a batch took longer; here the rollout that does fails, and is replaced.
        "timeout_seconds": args.async_generation_timeout,
    }
    return table if environment.name is None else {**table, "name": environment.name}


def _batch(draft: Draft) -> int:
    """Rollouts of a batch, and the optimizer steps on it."""
    per_device, accumulation = (
        draft.count("per_device_train_batch_size"),
        draft.count("gradient_accumulation_steps"),
    )
    processes, group = draft.count("num_processes"), draft.count("num_generations", least=2)
    effective = per_device * accumulation * processes
    generated = _generated(draft, effective)
    minibatches = generated // effective
    if generated % group:
        divisors = ", ".join(str(one) for one in range(2, generated + 1) if generated % one == 0)
        raise ConfigError(
            f"args.num_generations = {group} does not divide the {generated} rollouts of a batch "
            "(per_device_train_batch_size * gradient_accumulation_steps * num_processes); "
            f"change these, or set it to one of {divisors}"
        )
    draft.put("batch_size", generated, "per_device_train_batch_size")
    draft.put("rollouts_per_example", group, "num_generations")
    draft.take("num_iterations", "algorithm.num_iterations")
    draft.put("algorithm.num_minibatches", minibatches, "generation_batch_size")
    return draft.count("num_iterations") * minibatches


def _generated(draft: Draft, effective: int) -> int:
    """Rollouts that are sampled together: as many as are trained, or a multiple, trained in as many steps."""
    args = draft.args
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError("args.generation_batch_size and args.steps_per_generation say the same; give one")
    name, asked = "generation_batch_size", effective
    if args.steps_per_generation is not None:
        name = "steps_per_generation"
        asked = draft.count(name) * effective // args.gradient_accumulation_steps
    elif args.generation_batch_size is not None:
        asked = draft.count(name)
    if asked < effective:
        draft.notes.append(
            f"args.{name} = {getattr(args, name)} is without effect: rollouts are sampled one by one as "
            f"places become free (max_concurrent), and trained {effective} at a time"
        )
        return effective
    if asked % effective:
        raise ConfigError(
            f"args.{name} = {getattr(args, name)} is refused: {asked} rollouts are no multiple of the "
            f"{effective} of an optimizer step (per_device_train_batch_size * "
            "gradient_accumulation_steps * num_processes)"
        )
    return asked


def _lengths(draft: Draft, context: int | None) -> int:
    """The longest sequence of prompt and completion that is trained: what dr_grpo divides by, too."""
    args = draft.args
    name = "max_seq_len"
    if args.max_completion_length is not None:
        name = "max_completion_length"
        length = draft.count(name)
        if args.max_seq_len is None and args.max_prompt_length is not None:
            length += draft.count("max_prompt_length")
        draft.notes.append(
            f"args.max_completion_length = {args.max_completion_length} sets max_seq_len to {length}, as "
            "there; set max_seq_len (prompt and completion) and max_tokens (one answer) instead"
        )
    elif args.max_seq_len is None:
        raise ConfigError("args.max_seq_len is not set; set it to the longest prompt with its completion")
    else:
        length = draft.count(name, least=2)
    if args.max_prompt_length is not None:
        draft.put("max_prompt_tokens", draft.count("max_prompt_length"), "max_prompt_length")
    draft.put("inference.max_model_len", min(length, context or length), name)
    # What one device held at once.
    draft.put("microbatch_tokens", args.per_device_train_batch_size * length, "per_device_train_batch_size")
    return length


def _sampling(draft: Draft) -> None:
    args = draft.args
    # Without it there it was max_seq_len, here what is left of that after the prompt: the same rollouts.
    for name in ("max_tokens", "min_p"):
        if getattr(args, name) is not None:
            draft.take(name, f"sampling.{name}")
    if args.top_k not in (None, -1):  # vLLM's word for off
        draft.take("top_k", "sampling.top_k")
    draft.take("temperature", "sampling.temperature")
    for name, off in (
        ("top_p", 1.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        if getattr(args, name) != off:
            draft.take(name, f"sampling.{name}")


def _algorithm(draft: Draft, length: int, *, adapted: bool) -> None:
    args = draft.args
    loss_type = draft.chosen("loss_type", tuple(AGGREGATIONS), _AS_PRESETS)
    draft.put("algorithm.aggregation", AGGREGATIONS[loss_type], "loss_type")
    if loss_type == "dr_grpo":
        draft.put("algorithm.constant_tokens", length, "max_seq_len")
    draft.put("algorithm.advantage", _advantage(args.scale_rewards), "scale_rewards")
    draft.put("algorithm.loss", "ppo", "loss_type")
    # The ratio of the original is that against the policy at the beginning of the batch.
    draft.put("algorithm.proximal", True, "num_iterations")
    draft.take("epsilon", "algorithm.clip_low")
    high = "epsilon" if args.epsilon_high is None else "epsilon_high"
    draft.take(high, "algorithm.clip_high")
    if args.delta is not None:
        draft.take("delta", "algorithm.delta")
    draft.take("mask_truncated_completions", "algorithm.overlong_filtering")
    draft.take("beta", "algorithm.kl_coef")
    if not args.sync_ref_model or args.beta == 0:
        return
    if adapted:
        draft.notes.append(
            "args.sync_ref_model = True is taken as False, as there: with peft_config the reference is the "
            "model without its adapter"
        )
        return
    draft.take("ref_model_sync_steps", "algorithm.reference.sync_steps")
    draft.take("ref_model_mixup_alpha", "algorithm.reference.mixup_alpha")


def _advantage(scale_rewards: object) -> str:
    """By Verifiers' words for it, or TRL's. Raises ConfigError."""
    match scale_rewards:
        case True | "group":
            return "grpo"
        case False | "none":
            return "dr_grpo"
    raise ConfigError(
        f'args.scale_rewards = {scale_rewards!r} is refused: should be True ("group") or False ("none"); '
        'overrides = {"algorithm": {"advantage": "reinforce_pp"}} divides by one deviation of the batch'
    )


def _evaluation(draft: Draft, steps: Steps) -> None:
    args = draft.args
    interval = 0
    if draft.chosen("eval_strategy", ("no", "steps")) == "steps":
        interval = steps.every("eval_steps", fallback="logging_steps")
    wanted = bool(interval) or args.eval_on_start
    draft.put("eval.num_examples", ALL_EXAMPLES if wanted else 0, "eval_strategy")
    draft.put("eval.interval", interval, "eval_steps")
    draft.take("eval_on_start", "eval.before")
    draft.put("eval.after", bool(interval) and steps.total % interval == 0, "eval_steps")


def _states(draft: Draft, steps: Steps) -> None:
    if saving(draft, ("steps",)) != "no":
        draft.put("ckpt.interval", steps.every("save_steps"), "save_steps")


def _services(draft: Draft, model: Model, environments: Sequence[Environment]) -> None:
    args = draft.args
    deployment(draft)
    if args.no_cuda:
        draft.put("trainer.device", "cpu", "no_cuda")
    if not (model.use_liger or args.use_liger_kernel):
        draft.put("trainer.liger", "off", "use_liger_kernel")
    named: dict[str, str] = {}
    for one in environments:
        if one.python is not None and named.setdefault(one.id, one.python) != one.python:
            two = f"{named[one.id]!r} and {one.python!r}"
            raise ConfigError(f"env: {one.id!r} has one interpreter in a run, not {two}; give one of them")
    if named:
        table = {name: {"python": python} for name, python in named.items()}
        draft.table["envhost"] = {"environments": table}


def _logging(draft: Draft, steps: Steps) -> Logging:
    args = draft.args
    if draft.chosen("logging_strategy", ("no", "steps")) == "no":
        return Logging(0)
    every = steps.every("logging_steps")
    if not args.log_completions:
        return Logging(every, args.logging_first_step)
    # Without a number there one was printed, whatever was said.
    completions = 1 if args.num_completions_to_print is None else draft.count("num_completions_to_print", 0)
    groups = draft.table["batch_size"] // draft.table["rollouts_per_example"]
    draft.put("messages_of_members", max(1, math.ceil(completions / groups)), "num_completions_to_print")
    return Logging(every, args.logging_first_step, completions)
