"""How many completions a step has, and how many steps there are: TRL's counting, as a run's.

A generation batch there is per_device_train_batch_size * num_processes * steps_per_generation completions, an
optimizer step per_device_train_batch_size * num_processes * gradient_accumulation_steps.

1. Where a generation batch is as large as a step, or n times as large, it is a batch of the run, trained in
   as many optimizer steps (algorithm.num_minibatches), num_iterations times.
2. Where it is a part of a step, all of the step are sampled together: the same policy samples them there,
   too.
3. An epoch has as many steps as there, whose last prompts, fewer than a generation batch, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quartet.config.model import ConfigError
from quartet.scripts.draft import Draft


@dataclass(frozen=True)
class Batches:
    """What a script's arguments come to."""

    #: Prompts of a generation batch.
    prompts: int
    #: Micro-batches of a device for each generation batch, over all iterations, and for an optimizer step.
    micro_batches: int
    accumulated: int
    #: Optimizer steps on a batch of the run.
    steps_per_batch: int

    def steps_of_epoch(self, prompts: int) -> int:
        """Optimizer steps of one pass over so many prompts, as transformers counts them. Raises
        ConfigError."""
        batches = prompts // self.prompts
        if not batches:
            raise ConfigError(
                f"train_dataset has {prompts} prompts, and one batch takes {self.prompts} "
                "(generation_batch_size / num_generations), so an epoch has no step; set args.max_steps, or "
                "a smaller batch"
            )
        return math.ceil(batches * self.micro_batches / self.accumulated)

    def steps_of_epochs(self, epochs: float, prompts: int) -> int:
        """Of several, or of a part of one."""
        return math.ceil(epochs * self.steps_of_epoch(prompts))


def batches(draft: Draft) -> Batches:
    """Puts batch_size, rollouts_per_example and the steps on a batch. Raises ConfigError."""
    per_device, accumulated = draft.count("per_device_train_batch_size"), _accumulated(draft)
    processes, group = draft.count("num_processes"), draft.count("num_generations", least=2)
    iterations, per_generation = draft.count("num_iterations"), _per_generation(draft)
    generated, step = (per_device * processes * count for count in (per_generation, accumulated))
    if generated % group:
        divisors = ", ".join(str(one) for one in range(2, generated + 1) if generated % one == 0)
        raise ConfigError(
            f"args.num_generations = {group} does not divide the {generated} completions of a generation "
            "batch (per_device_train_batch_size * num_processes * steps_per_generation, which is "
            "gradient_accumulation_steps where nothing is said); "
            f"change these, or set it to {f'one of {divisors}' if divisors else 'less, and these to more'}"
        )
    if generated < step and (step % generated or iterations > 1):
        raise ConfigError(
            f"args.steps_per_generation = {per_generation} is refused: completions of several generations, "
            f"or the same ones {iterations} times, would be in one optimizer step of "
            f"gradient_accumulation_steps = {accumulated}; set it to a multiple of that"
        )
    if generated > step and generated % step:
        raise ConfigError(
            f"args.steps_per_generation = {per_generation} is refused: should be a multiple of "
            f"gradient_accumulation_steps = {accumulated}, so that an optimizer step is of one generation"
        )
    minibatches = max(generated // step, 1)
    if step % group:
        raise ConfigError(
            f"args.num_generations = {group} does not divide the {step} completions of an optimizer step "
            "(per_device_train_batch_size * gradient_accumulation_steps * num_processes), and groups stay "
            "whole here; raise gradient_accumulation_steps"
        )
    draft.put("batch_size", max(generated, step), "per_device_train_batch_size")
    draft.put("rollouts_per_example", group, "num_generations")
    draft.take("num_iterations", "algorithm.num_iterations")
    draft.put("algorithm.num_minibatches", minibatches, "steps_per_generation")
    return Batches(generated // group, per_generation * iterations, accumulated, iterations * minibatches)


def _accumulated(draft: Draft) -> int:
    return draft.count("gradient_accumulation_steps")


def _per_generation(draft: Draft) -> int:
    """Micro-batches of a device whose completions are sampled together. Raises ConfigError."""
    args = draft.args
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError("args.generation_batch_size and args.steps_per_generation say the same; give one")
    if args.steps_per_generation is not None:
        return draft.count("steps_per_generation")
    if args.generation_batch_size is None:
        return _accumulated(draft)
    generated = draft.count("generation_batch_size")
    at_once = draft.count("per_device_train_batch_size") * draft.count("num_processes")
    if generated % at_once:
        raise ConfigError(
            f"args.generation_batch_size = {generated} is refused: should be a multiple of the {at_once} of "
            "all devices at once (per_device_train_batch_size * num_processes)"
        )
    return generated // at_once
