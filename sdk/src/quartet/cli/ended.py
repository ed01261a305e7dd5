"""How a run ended that did not fail: it was completed, or stopped; and what is said of that."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from quartet.cli import exits
from quartet.cli.elsewhere.withheld import withheld
from quartet.cli.job import Job
from quartet.cli.outputs import CHECKPOINT
from quartet.counted import counted
from quartet.kit.standard_streams import shown as foreign
from quartet.run.config import RunConfig
from quartet.run.sampling import EvalSamplingConfig

_NUMBER: Final = re.compile(r"\d[\d.e+-]*")
#: Characters of an environment's arguments, or of how it is sampled, that are told as part of a command.
MAX_ARGS = 300


@dataclass(frozen=True)
class Ended:
    """A run that did not fail: it was completed, or stopped."""

    summary: dict[str, Any]
    completed: bool
    #: Where it is shown, in a sentence.
    shown: str = ""
    #: Whether it was stopped before it was accepted, and the folder holds what it held before.
    put_back: bool = False


def say_ended(job: Job, ended: Ended) -> int:
    """Say how, and how to go on. The exit code."""
    if ended.completed:
        say_completed(job, ended.summary)
        # Of what was said again with other numbers, the last.
        for note in {_NUMBER.sub("", note): note for note in ended.summary["notes"]}.values():
            print(f"it was said on the way: {foreign(note)}")
        return 0
    if ended.put_back:
        print(f"stopped before the run began; {job.folder} holds what it held")
        return exits.INTERRUPTED
    steps = ended.summary["steps"]
    print(f"stopped after step {steps}; go on with: {job.words.going_on(job.folder)}")
    if steps and not job.config.external_trainer:  # else the weights are with the program that trains
        print(f"or write the model as it is: quartet export {shlex.quote(str(job.folder))} MODEL_FOLDER")
    return exits.INTERRUPTED


def say_completed(job: Job, summary: dict[str, Any]) -> None:
    """Say what it came to, and where that is."""
    steps, seconds = counted(summary["steps"], "step"), summary["wall_seconds"]
    print(f"completed: reward {_rewards(summary)} in {steps}, {seconds:.0f} s")
    if job.config.external_trainer:  # the model is with the program that trains
        print(f"metrics and figure: {job.folder}")
        return
    print(f"checkpoint, metrics and figure: {job.folder}")
    model = shlex.quote(str(job.folder / CHECKPOINT))
    print(f"talk to it: python -m quartet_inference --model {model} --openai.address 127.0.0.1:8000")
    if measures := _measuring(job.config):
        print(f"measure it: quartet eval {measures[0]} -m {model}{measures[1]}")


def _measuring(config: RunConfig) -> tuple[str, str] | None:
    """The environment whose reward was told, for `quartet eval`, with what it needs beside and how the
    answers were sampled; None where that, or its arguments, are nothing to print."""
    env, more = (*config.eval.env, *config.env)[0], ""
    for trial in config.trials[:1]:
        more += "".join(f" {one}" for one in _sampling(trial.sampling))
    if len(more) > MAX_ARGS:
        return None
    if env.args:
        args = json.dumps(env.args)
        if len(args) > MAX_ARGS or withheld(env.args) != env.args:
            return None
        more += f" -a {shlex.quote(args)}"
    if python := config.envhost.get("python"):
        more += f" --envhost.python {shlex.quote(python)}"
    return shlex.quote(env.id), more


def _sampling(config: EvalSamplingConfig) -> Iterator[str]:
    """The options of `quartet eval` that sample so; what is the engine's default is left out."""
    said = config.model_dump(exclude_none=True)
    if (most := said.pop("max_tokens", None)) is not None:
        yield f"-t {most}"
    if (temperature := said.pop("temperature", 1.0)) != 1.0:
        yield f"-T {temperature:g}"
    for key, value in said.items():
        if value != ():  # no stops
            yield shlex.quote(f"--sampling.{key.replace('_', '-')}={json.dumps(value)}")


def _rewards(summary: dict[str, Any]) -> str:
    """That of all, or, where agents are rewarded apart, of each: those of a game may earn nothing together.
    Where there are other environments, of all and of each."""
    total = f"{_shown(summary['reward_before'])} -> {_shown(summary['reward_after'])}"
    # A summary of an earlier release has none.
    before, after = (summary.get(f"agents_{when}", {}) for when in ("before", "after"))
    roles = sorted({(env, role) for one in (before, after) for env, of_it in one.items() for role in of_it})
    if not roles:
        return total
    alone = len(before | after) == 1
    each = ", ".join(
        f"{foreign(role if alone else f'{env} {role}')} "
        f"{_shown(before.get(env, {}).get(role))} -> {_shown(after.get(env, {}).get(role))}"
        for env, role in roles
    )
    return each if alone else f"{total} ({each})"


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "(not measured)"
