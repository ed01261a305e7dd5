"""Every argument of TRL's GRPOConfig and of GRPOTrainer is known to quartet.trl, with its default, and steps
are counted as TRL and transformers count them.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.scripts.models import Model
from quartet.trl import GRPOConfig, GRPOTrainer
from quartet.trl.elsewhere import OF_TRL
from quartet.trl.trainer import GIVEN, NOT_HERE
from quartet.trl.translate import Data, translate

trl = pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

#: Quartet's own, and of transformers 4.
OURS = {"num_processes", "overrides", "rollout_timeout", "overwrite_output_dir", "warmup_ratio"}


def test_every_argument_is_known_with_its_default() -> None:
    differing = {}
    for one in dataclasses.fields(trl.GRPOConfig):
        there = one.default_factory() if callable(one.default_factory) else one.default
        here = getattr(GRPOConfig(), one.name)
        if here != getattr(there, "value", there) and one.name != "output_dir":
            differing[one.name] = (here, there)
    assert differing == {}


def test_what_is_known_is_an_argument_there() -> None:
    theirs = {one.name for one in dataclasses.fields(trl.GRPOConfig)}
    names = GRPOConfig.names()
    assert set(names) - theirs == OURS and theirs <= set(names)
    assert len(names) == len(set(names)), "each has one fate"


def test_every_argument_of_the_trainer_is_taken_or_refused_in_its_place() -> None:
    theirs = list(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    ours = list(inspect.signature(GRPOTrainer.__init__).parameters)
    assert ours == [*theirs, "unknown"]
    assert {*GIVEN, *NOT_HERE} == {*theirs} - {"self"}
    assert set(NOT_HERE) <= GRPOTrainer.ELSEWHERE.keys()


def test_every_class_of_the_module_is_here_or_told() -> None:
    classes = {name for name in trl.__all__ if name[0].isupper()}
    assert classes - {"GRPOTrainer", "GRPOConfig", "SFTTrainer", "SFTConfig"} <= OF_TRL.keys()


def steps_there(prompts: int, given: dict[str, Any], processes: int) -> int:
    """By the sampler of GRPOTrainer, accelerate's share of a process, and the formula of transformers."""
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader
    from transformers import Trainer
    from trl.trainer.utils import RepeatSampler

    args = SimpleNamespace(
        **{"num_train_epochs": 3.0, "max_steps": -1, "gradient_accumulation_steps": 1, **given}
    )
    micro = args.per_device_train_batch_size
    if getattr(args, "generation_batch_size", None) is not None:
        args.steps_per_generation = args.generation_batch_size // (micro * processes)
    elif getattr(args, "steps_per_generation", None) is None:
        args.steps_per_generation = args.gradient_accumulation_steps
    generated = micro * processes * args.steps_per_generation
    rows = list(range(prompts))
    sampler = RepeatSampler(
        rows,
        mini_repeat_count=args.num_generations,
        batch_size=generated // args.num_generations,
        repeat_count=getattr(args, "num_iterations", 1) * args.steps_per_generation,
    )
    loader = DataLoader(rows, batch_size=micro * args.steps_per_generation, sampler=sampler)
    if processes > 1:
        loader = prepare_data_loader(loader, num_processes=processes, process_index=0, put_on_device=False)
    trainer: Any = object.__new__(Trainer)
    trainer.args = args
    trainer.get_total_train_batch_size = lambda args: generated
    trainer.get_sp_size = lambda: 1
    return int(trainer.set_initial_training_values(args, loader)[6])


def test_epochs_have_as_many_steps_as_there() -> None:
    """Over a table of settings; those that are refused here are no settings of it."""
    compared = 0
    for micro, accumulated, generations, processes, per_generation, iterations, prompts in itertools.product(
        (2, 8), (1, 3), (2, 4), (1, 2), (None, 1, 2, 6), (1, 2), (7, 24, 101)
    ):
        of_epoch = -1
        for epochs in (1.0, 0.5, 2.5):
            given = {
                "per_device_train_batch_size": micro,
                "gradient_accumulation_steps": accumulated,
                "num_generations": generations,
                "steps_per_generation": per_generation,
                "num_iterations": iterations,
                "num_train_epochs": epochs,
            }
            args = GRPOConfig(num_processes=processes, **given)
            try:
                run = translate(args, Model("m", "/m"), Data(prompts, 0, "unix:/s"))
            except ConfigError:
                continue
            theirs = steps_there(prompts, given, processes)
            of_epoch = theirs if epochs == 1.0 else of_epoch
            batches = -(-theirs // run.steps_per_batch)
            assert run.config.max_steps == batches, (given, processes, prompts)
            assert run.steps_of_epoch == of_epoch, (given, processes, prompts)
            compared += 1
    assert compared > 500
    given = {"per_device_train_batch_size": 4, "num_generations": 4, "generation_batch_size": 16}
    run = translate(GRPOConfig(**given), Model("m", "/m"), Data(50, 0, "unix:/s"))
    assert run.config.max_steps * run.steps_per_batch == steps_there(50, given, 1)
