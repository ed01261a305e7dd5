"""The dialect of `vf-rl`, the trainer that Verifiers had (RLTrainer, verifiers 0.1.9): its TOML as a run.

1. Every key of its RLConfig is translated to what does the same here, or has no effect here and is told as
   such, or is refused in one sentence. Nothing is ignored silently.
2. What a file leaves out has the default that it has there, not Quartet's.
3. Keys that are none of its own ([eval], max_off_policy_steps, [inference] engine) are Quartet's and win.

Its loss is -r * A of every token whose ratio r = trainer / sampler lies inside [mask_ratio_low,
mask_ratio_high], over all tokens of the batch, with A = reward - mean of the group. That is `ppo` against the
proximal policy, which in the only step on a batch is the policy itself (so nothing is clipped, and nothing
computed twice), times the correction's weight r where it is inside the bounds, and 0 outside.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.dialect import (
    Engine,
    RunDraft,
    Translation,
    Untranslated,
    give_way,
    lay_over,
    refusal,
    refuse,
    shown,
)
from quartet.run.lora import ALL_LINEAR
from quartet.run.vf_rl.given import Given
from quartet.run.vf_rl.keys import (
    ALWAYS,
    DEFAULTS,
    INHERITED,
    LORA_TARGETS,
    OF_GRPO,
    OF_THE_CHAT,
    OF_THE_ENGINE,
    OF_THE_SERVER,
    SAME,
    SAME_OF_LORA,
    SCHEDULERS,
    WITHOUT_EFFECT,
)

_NOTHING: Mapping[str, Any] = {}


def translate(
    tables: Mapping[str, Any],
    engine: Engine = "embedded",
    *,
    has_two_gpus: bool = False,
    wandb_project: str | None = None,
    own: Mapping[str, Any] = _NOTHING,
) -> Translation:
    """The run. `has_two_gpus`: the machine, so that trainer and embedded engine get one each.
    `wandb_project`: for the table [wandb]; None where a run has none. `own`: what is said beside the file in
    Quartet's own words, which will be laid over it.

    Raises ConfigError where a table is none, and else Untranslated.
    """
    given = Given.of(tables, own)
    run = _Run()
    for path, fixed in ALWAYS.items():
        run.put(path, fixed, "what vf-rl always does")
    for key, path in SAME.items():
        run.copy(given, key, path)
    parts: tuple[Callable[[], object], ...] = (
        *(partial(part, given, run) for part in _PARTS),
        lambda: _inference(given, run, engine, has_two_gpus=has_two_gpus),
        lambda: _reports(given, run, wandb_project),
        lambda: run.names.update(run_name=given.text("run_name")),
        lambda: run.names.update(output_dir=given.text("output_dir")),
    )
    refused = [*_refusals(given)]
    for part in parts:
        try:
            part()
        except ConfigError as error:
            refused.append(error)
    told = [key for key in WITHOUT_EFFECT if key in given.args]
    run.unread += [shown(f"trainer.args.{key}", given.value(key), WITHOUT_EFFECT[key]) for key in told]
    _give_way(given, run, own)
    lay_over(run.tables, given.others)
    if refused:
        raise Untranslated(together(refused), run.finished())
    return run.finished()


def _give_way(given: Given, run: _Run, own: Mapping[str, Any]) -> None:
    """To a loss or a preset in Quartet's own words, in the file or beside it."""
    for said in (given.others.get("algorithm"), own.get("algorithm")):
        give_way(run.tables["algorithm"], said)
        if isinstance(said, dict) and "preset" in said and "mask_truncated_completions" not in given.args:
            run.tables["algorithm"].pop("overlong_filtering", None)  # a default, and dapo has another


class _Run(RunDraft):
    """The run as it grows."""

    def copy(self, given: Given, key: str, path: str) -> None:
        if (value := given.value(key)) is not None:
            self.put(path, value, given.source(key))

    def without(self, given: Given, key: str, why: str) -> None:
        if key in given.args:
            self.leave([shown(f"trainer.args.{key}", given.args[key], why)])


def _environment(given: Given, run: _Run) -> None:
    env = copy.deepcopy(given.env)
    if "timeout_seconds" not in env:
        env["timeout_seconds"] = given.value("generation_timeout")
        run.origins["env", "0", "timeout_seconds"] = given.source("generation_timeout")
    run.tables["env"] = [env]
    run.origins["env", "0"] = "env"


def _sampling(given: Given, run: _Run) -> None:
    key = "max_seq_len" if given.value("max_tokens") is None else "max_tokens"
    run.put("sampling.max_tokens", given.count(key), given.source(key))
    if (top_k := given.value("top_k")) is not None:
        # -1 is vLLM's word for all of them.
        run.put("sampling.top_k", 0 if top_k == -1 else top_k, given.source("top_k"))


def _batches(given: Given, run: _Run) -> None:
    tokens = given.count("micro_batch_size") * given.count("max_seq_len")
    run.put("microbatch_tokens", tokens, "trainer.args.micro_batch_size times max_seq_len")


def _optimizer(given: Given, run: _Run) -> None:
    kind = given.value("lr_scheduler_type")
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        remedy = f"choose {', '.join(SCHEDULERS)}, or write lr_scheduler in a file of Quartet's own"
        refuse("trainer.args.lr_scheduler_type", kind, remedy)
    run.put("lr_scheduler", SCHEDULERS[kind], given.source("lr_scheduler_type"))
    if kind == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            run.without(given, key, 'lr_scheduler_type = "constant" has none; "constant_with_warmup" has')
    elif given.value("warmup_steps"):
        run.put("warmup_steps", given.value("warmup_steps"), given.source("warmup_steps"))
        run.without(given, "warmup_ratio", "warmup_steps decides")
    elif given.value("warmup_ratio"):
        run.put("warmup_steps", given.part("warmup_ratio"), given.source("warmup_ratio"))
    optim = given.value("optim")
    if optim == "sgd":
        run.put("optimizer", "sgd", given.source("optim"))
        run.put("momentum", 0.0, given.source("optim"))
    elif optim not in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        refuse("trainer.args.optim", optim, 'choose "adamw_torch" or "sgd", or set optimizer = "muon"')


def _lora(given: Given, run: _Run) -> None:
    run.put("lora.enabled", given.flag("use_lora"), given.source("use_lora"))
    if given.value("lora_config") is not None:
        refuse("trainer.args.lora_config", given.value("lora_config"), "give lora_rank, lora_alpha, ...")
    if not given.flag("use_lora"):
        for key in (*SAME_OF_LORA, "lora_target_modules"):
            run.without(given, key, "use_lora = false")
        return
    for key, path in SAME_OF_LORA.items():
        run.copy(given, key, path)
    # RLTrainer merges the adapter before it updates the engine.
    run.put("lora.publish", "merged", "what vf-rl always does")
    targets = given.value("lora_target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        refuse("trainer.args.lora_target_modules", targets, 'write a list of names, or "all-linear"')
    run.put(
        "lora.target_modules",
        list(LORA_TARGETS) if targets is None else targets,
        given.source("lora_target_modules"),
    )


def _checkpoints(given: Given, run: _Run) -> None:
    match given.value("save_strategy"):
        case "steps":
            run.put("ckpt.interval", given.interval("save_steps"), given.source("save_steps"))
        case "no":
            # The state after the last step is saved in any case.
            run.put("ckpt.interval", given.steps(), given.source("save_strategy"))
            run.without(given, "save_steps", 'save_strategy = "no"')
        case other:
            refuse("trainer.args.save_strategy", other, 'choose "steps", with save_steps, or "no"')


def _evaluations(given: Given, run: _Run) -> None:
    strategy, source = given.value("eval_strategy"), given.source("eval_strategy")
    match strategy:
        case "no":
            if "eval" not in given.others:
                run.put("eval.num_examples", 0, source)
            run.without(given, "eval_steps", 'eval_strategy = "no"')
            run.without(given, "eval_on_start", 'eval_strategy = "no"')
        case "steps":
            every = given.interval("eval_steps")
            run.put("eval.interval", every, given.source("eval_steps"))
            run.put("eval.before", given.flag("eval_on_start"), given.source("eval_on_start"))
            # `interval` is about the steps between; the last one is `after`.
            run.put("eval.after", given.steps() % every == 0, source)
        case other:
            refuse("trainer.args.eval_strategy", other, 'choose "steps", with eval_steps, or "no"')


def _refusals(given: Given) -> Iterator[ConfigError]:
    """What would be trained otherwise than the file says."""
    told: tuple[tuple[str, Any, str], ...] = (
        ("mask_env_responses", True, "tokens of environments are never learned here; remove it"),
        (
            "zero_truncated_completions",
            False,
            "let the environment reward it so; remove it",
        ),
        ("shuffle_dataset", True, "tasks come in a new order in each epoch; remove it"),
        ("fp16", False, "the trainer computes in bfloat16 or float32; remove it"),
        ("deepspeed", None, "set gpus of [trainer]: ranks share the model by FSDP; remove it"),
        ("fsdp", None, "set gpus of [trainer]: ranks share the model by FSDP; remove it"),
        ("resume_from_checkpoint", None, "write --resume with --output-dir; remove it"),
    )
    for key, only, remedy in told:
        if given.value(key) not in (only, None, "", False if only is None else only):
            yield refusal(f"trainer.args.{key}", given.value(key), remedy)
    known = {*DEFAULTS, *INHERITED, *WITHOUT_EFFECT}
    for key, value in given.args.items():
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.75)
            remedy = f"did you mean {close[0]!r}?" if close else "Quartet has no such setting; remove it"
            yield refusal(f"trainer.args.{key}", value, OF_GRPO.get(key, remedy))


def _trainer(given: Given, run: _Run) -> None:
    run.put("trainer.liger", "auto" if given.flag("use_liger") else "off", given.source("use_liger"))
    # bf16 = true is what the trainer does by itself wherever RLTrainer runs: on a GPU.
    if not given.flag("bf16"):
        run.put("compute_dtype", "float32", given.source("bf16"))


_PARTS = (_environment, _sampling, _batches, _optimizer, _lora, _checkpoints, _evaluations, _trainer)


def _inference(given: Given, run: _Run, engine: Engine, *, has_two_gpus: bool) -> None:
    args = dict(given.inference_args)
    run.put("inference.engine", engine, "inference")
    for key, path in OF_THE_CHAT.items():
        if key in args:
            run.put(f"inference.{path}", args.pop(key), f"inference.args.{key}")
    if "max_model_len" in args:
        run.put("inference.max_model_len", args.pop("max_model_len"), "inference.args.max_model_len")
    for key, path in OF_THE_ENGINE.items():
        if key in args and (value := args.pop(key)) != "auto":
            run.put(f"inference.{engine}.{path}", value, f"inference.args.{key}")
    for key in [key for key in args if key in OF_THE_SERVER]:
        run.unread.append(shown(f"inference.args.{key}", args.pop(key), OF_THE_SERVER[key]))
    if engine == "vllm":
        run.put("trainer.gpus", given.trainer_gpus, "trainer.gpus")
        # A replica for each tensor_parallel_size of them is what vf-rl's data_parallel_size is.
        run.put("inference.gpus", given.inference_gpus, "inference.gpus")
        for key, value in args.items():
            run.put(f"inference.vllm.args.{key}", value, f"inference.args.{key}")
        return
    for service, gpus in (("trainer", given.trainer_gpus), ("inference", given.inference_gpus)):
        # One each is what a file says that says nothing, also for a machine without any.
        if given.trainer_gpus == given.inference_gpus == 1 and not has_two_gpus:
            run.unread.append(shown(f"{service}.gpus", gpus, "without vLLM both take the GPU, or the CPU"))
        else:
            run.put(f"{service}.gpus", gpus, f"{service}.gpus")
    run.unread += [
        shown(f"inference.args.{key}", value, "of vLLM, and the embedded engine samples")
        for key, value in args.items()
    ]


def _reports(given: Given, run: _Run, wandb_project: str | None) -> None:
    """Metrics are in metrics.jsonl; elsewhere only by a word of the file: not everybody has an account."""
    value = given.args.get("report_to", [])
    if not isinstance(value, str | list):
        refuse("trainer.args.report_to", value, 'should be "wandb", "tensorboard", "none" or a list of such')
    asked = [value] if isinstance(value, str) else value
    if wandb_project and "wandb" in asked:
        run.put("wandb.project", wandb_project, "trainer.args.report_to")
        run.copy(given, "run_name", "wandb.name")
    if "tensorboard" in asked:
        run.put("tensorboard.enabled", True, "trainer.args.report_to")
    if {"wandb" if wandb_project else "", "tensorboard"} & set(asked):
        return
    more = "; write it in the file to report there, too" if wandb_project and not value else ""
    run.unread.append(
        shown("trainer.args.report_to", given.value("report_to"), f"metrics are in metrics.jsonl{more}")
    )
