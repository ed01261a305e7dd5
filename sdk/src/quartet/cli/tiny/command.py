"""Make a small Qwen3 model (0.63 million parameters) with its tokenizer, by training it here through the
trainer service.

First it learns to reverse short texts from clean demonstrations. Then it learns a bad habit, from
demonstrations of which most repeat the text unreversed, until its reward is near 0.4. So reinforcement
learning has a skill to bring back, and can be watched doing so within a minute: it is a demonstration of
the machinery, not of a model learning something new.

--task makes a model for another environment, from the demonstrations that its package has.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli import exits
from quartet.cli.held import empty, held
from quartet.cli.outputs import write_json
from quartet.cli.tiny.courses import REVERSE_TEXT, SEEDS_APART, Course, Packaged, ReverseText, default_python
from quartet.cli.tiny.files import build_tokenizer, write_model_files
from quartet.cli.tiny.teach import Lesson, Services
from quartet.config import ConfigError
from quartet.kit.channel import connect
from quartet.local.beside import AddressBook, beside
from quartet.local.deployment import check, write
from quartet.local.supervisor import ServiceFailed
from quartet.local.wiring import wire
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from quartet.v1.trainer_service_pb2 import SCHEDULE_CONSTANT, OptimizerSpec
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

SKILL_STEPS, SKILL_EVERY, HABIT_STEPS = 400, 10, 60
SKILL_OPTIMIZER = OptimizerSpec(
    learning_rate=2e-3, beta1=0.9, beta2=0.98, weight_decay=0.01, max_grad_norm=1.0,
    schedule=SCHEDULE_CONSTANT, warmup_steps=20,
)  # fmt: skip
HABIT_OPTIMIZER = OptimizerSpec(
    beta1=0.9, beta2=0.98, weight_decay=0.01, max_grad_norm=1.0,
    schedule=SCHEDULE_CONSTANT, warmup_steps=5,
)  # fmt: skip
#: What every course is taught and measured by; the image that makes models (sdk/Dockerfile) has these.
BESIDE = ("trainer", "inference")
DRAIN_SECONDS = 2.0
RECORD = "quartet.json"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json", RECORD)


@dataclass(frozen=True)
class Made:
    """How the model came out."""

    folder: Path
    skill_steps: int
    skill_reward: float
    habit_steps: int
    habit_reward: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of initialisation, demonstrations and sampling")
    parser.add_argument(
        "--task", default=REVERSE_TEXT, metavar="ID", help="environment to make it for (default: %(default)s)"
    )
    parser.add_argument(
        "--python", type=Path, default=default_python(), help="interpreter that has the environment of --task"
    )
    parser.add_argument("--force", action="store_true", help="make it again where it exists")


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a finished model."""
    return all((folder / name).is_file() for name in NEEDED) and any(folder.glob("*.safetensors"))


def run(options: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    out: Path = options.out.resolve()  # a link cannot be replaced as a folder is
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"--seed {options.seed} is refused: use 0 to {2**32 - 1}")
    if is_complete(out) and not options.force:
        print(f"{out} is there already; --force makes it again")
        return 0
    _check_replaceable(out, options.force)
    started = time.monotonic()
    try:
        with _course(options) as course, _work(out) as work:
            made = asyncio.run(_make(work, course, options))
            _publish(made, work, out, options)
    except ServiceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.FAILED
    print(f"{out}: reward {made.habit_reward:.3f}, made in {time.monotonic() - started:.0f} s")
    return 0


def _check_replaceable(out: Path, force: bool) -> None:
    """Refuse to delete what is not a model. Raises ConfigError."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise ConfigError(f"OUT = {out} exists and is not a model folder; name another one")
    if any(out.iterdir()) and not force:
        raise ConfigError(f"OUT = {out} holds an incomplete model; --force replaces it")


@contextmanager
def _work(out: Path) -> Iterator[Path]:
    """A folder beside OUT, which is no more when it ends. Raises ConfigError."""
    work = out.with_name(f".{out.name}.partial")
    with held(work, f"OUT = {out} is being made by another 'quartet model tiny'; wait for its end"):
        empty(work)  # of one that was killed
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _course(options: argparse.Namespace) -> Iterator[Course]:
    """What is taught. Raises ConfigError."""
    if options.task == REVERSE_TEXT:
        yield ReverseText(options.seed)
        return
    with Packaged(options.task, options.python) as course:
        yield course


async def _make(work: Path, course: Course, options: argparse.Namespace) -> Made:
    """Both lessons, beside a trainer, inference, and a host where the course needs one."""
    base = work / "base"
    write_model_files(base, course.phrases)
    tables: dict[str, dict[str, Any]] = {service: {} for service in BESIDE}
    if not isinstance(course, ReverseText):
        tables["envhost"] = {"python": str(options.python)}
    specs = write(wire(str(base), work / "data", tables), work)
    await check(specs)

    async def lessons(book: AddressBook) -> Made:
        async with AsyncExitStack() as opened:
            channels = {name: await opened.enter_async_context(connect(book[name][0])) for name in tables}
            hosts: Any = EnvHostServiceStub
            services = Services(
                TrainerServiceStub(channels["trainer"]),  # type: ignore[no-untyped-call]
                InferenceServiceStub(channels["inference"]),  # type: ignore[no-untyped-call]
                hosts(channels["envhost"]) if "envhost" in channels else None,
            )
            return await _teach(services, base, course, options.seed)

    return await beside(specs, lessons, drain_s=DRAIN_SECONDS)


async def _teach(services: Services, base: Path, course: Course, seed: int) -> Made:
    """The skill, then the habit."""
    tokenizer = build_tokenizer(course.phrases)
    skill = Lesson(services, tokenizer, "tiny-skill", course, (seed, 0.0))
    await skill.begin(base, SKILL_OPTIMIZER, seed, from_scratch=True)
    skill_reward = await _learn_skill(skill, course, seed)
    skilled = await skill.export("skill")
    habits = (seed + 2 * SEEDS_APART, course.goals.habit_share)
    habit = Lesson(services, tokenizer, "tiny-habit", course, habits)
    optimizer = OptimizerSpec()
    optimizer.CopyFrom(HABIT_OPTIMIZER)
    optimizer.learning_rate = course.goals.habit_learning_rate
    await habit.begin(skilled, optimizer, seed, from_scratch=False)
    habit_reward = await _learn_habit(habit, course, seed)
    folder = await habit.export("habit")
    return Made(folder, skill.steps, skill_reward, habit.steps, habit_reward)


async def _learn_skill(lesson: Lesson, course: Course, seed: int) -> float:
    print(f"learning {course.task}:", flush=True)
    goals = course.goals
    while lesson.steps < SKILL_STEPS:
        loss = await lesson.step()
        if lesson.steps % SKILL_EVERY == 0:
            measured = await lesson.measure(goals.skill_samples, seed * SEEDS_APART + lesson.steps * 1000)
            print(f"  step {lesson.steps:3d}  loss {loss:.3f}  reward {measured:.3f}", flush=True)
            if measured >= goals.skill_reward:
                return measured
    raise ServiceFailed(
        f"the model did not learn within {SKILL_STEPS} steps (reward {measured:.2f}); try --seed {seed + 1}"
    )


async def _learn_habit(lesson: Lesson, course: Course, seed: int) -> float:
    print("learning the bad habit:", flush=True)
    goals = course.goals
    while lesson.steps < HABIT_STEPS:
        loss = await lesson.step()
        measured = await lesson.measure(goals.habit_samples, seed * SEEDS_APART + lesson.steps * 1000)
        print(f"  step {lesson.steps:3d}  loss {loss:.3f}  reward {measured:.3f}", flush=True)
        if measured <= goals.habit_reward:
            return measured
    raise ServiceFailed(
        f"the habit did not form within {HABIT_STEPS} steps (reward {measured:.2f}); try --seed {seed + 1}"
    )


def _publish(made: Made, work: Path, out: Path, options: argparse.Namespace) -> None:
    """Complete the exported folder and move it to its place, so that OUT is whole or not there."""
    for file in (work / "base").iterdir():
        if not (made.folder / file.name).exists():
            shutil.copy2(file, made.folder / file.name)
    record = {
        "made_by": "quartet model tiny",
        "task": options.task,
        "seed": options.seed,
        "skill": {"steps": made.skill_steps, "reward": made.skill_reward},
        "habit": {"steps": made.habit_steps, "reward": made.habit_reward},
    }
    write_json(made.folder / RECORD, record)
    if out.exists():
        shutil.rmtree(out)
    made.folder.rename(out)
