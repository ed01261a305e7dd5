"""`quartet env init`: a package that passes `quartet env check` as it is written, for its author to change.

The shape is the one of Verifiers' documentation (a v1 taskset exported through `__all__`), and beside it an
oracle, by which `check` knows that the right answer earns the full reward.
"""

from __future__ import annotations

import re
from pathlib import Path

from quartet.config import ConfigError

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{dash}"
version = "0.1.0"
description = "What {dash} teaches, in one line."
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4.0,<0.5"]

[tool.setuptools.packages.find]
include = ["{module}*"]
"""

EXPORTS = '''\
"""{dash}: see taskset.py."""

from {module}.taskset import {prefix}Taskset

__all__ = ["{prefix}Taskset"]
'''

TASKSET = '''\
"""{dash}: add two numbers, until its author writes something better.

1. The answer is the last number of the reply; the reward is 1 where it is the sum, else 0.
2. Examples are drawn from `seed`; training and evaluation never share one.
"""

import random
import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

SYSTEM_PROMPT = "Answer with one number."


class {prefix}Data(vf.TaskData):
    """One example: `prompt` is what the model reads, the rest is for the reward."""

    answer: str


class {prefix}Task(vf.Task[{prefix}Data]):
    """Ask once, compare the answer."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """Whether the last number of the reply is the answer. What raises here is a failure, never a 0."""
        numbers = re.findall(r"-?[0-9]+", trace.last_reply or "")
        return float(bool(numbers) and numbers[-1] == self.data.answer)

    @vf.metric
    async def reply_characters(self, trace: vf.Trace) -> float:
        """How long the reply is; a metric is reported, not learned from."""
        return float(len(trace.last_reply or ""))


class {prefix}Config(vf.TasksetConfig):
    """The arguments of the environment: `args = {{ ... }}` in a run, -a on the command line."""

    split: Literal["train", "eval"] = "train"
    num_train: int = Field(default=1000, ge=1)
    num_eval: int = Field(default=100, ge=1)
    largest: int = Field(default=99, ge=40)
    seed: int = 0


class {prefix}Taskset(vf.Taskset[{prefix}Task, {prefix}Config]):
    """The examples of the configured split."""

    def load(self) -> Iterator[{prefix}Task]:
        """Equal arguments give equal examples in equal order."""
        config = self.config
        pairs = [(a, b) for a in range(config.largest + 1) for b in range(config.largest + 1)]
        random.Random(config.seed).shuffle(pairs)
        held_out, rest = pairs[: config.num_eval], pairs[config.num_eval :]
        for a, b in held_out if config.split == "eval" else rest[: config.num_train]:
            data = {prefix}Data(prompt=f"{{a}} + {{b}} =", system_prompt=SYSTEM_PROMPT, answer=str(a + b))
            yield {prefix}Task(data, config.task)
'''

ORACLE = '''\
"""What a perfect policy says. `quartet env check {dash}` plays it; it must earn the full reward."""


def answer(task: dict, messages: list[dict]) -> str | dict:
    """The next message. `task` is the example's data, `messages` the conversation so far.

    A text, or {{"content": "...", "tool_calls": [{{"name": "...", "arguments": {{...}}}}]}} to call tools.
    """
    return f"It is {{task['answer']}}."
'''

README = """\
# {dash}

What it teaches, in a sentence or two.

```
quartet env install {folder}
quartet env check {dash}                          # the oracle earns everything, a wrong answer does not
quartet baseline {dash} -m MODEL                  # too hard, too easy, or fit to learn from
```

| argument | default | what |
|---|---|---|
| `num_train`, `num_eval` | 1000, 100 | how many examples |
| `largest` | 99 | the largest number to add |
| `seed` | 0 | which examples |

| reward | weight | what |
|---|---|---|
| `correct` | 1 | the last number of the reply is the sum |
"""


def write_package(name: str, parent: Path) -> Path:
    """The package's folder. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a package; use a-z, 0-9 and single dashes, such as my-env")
    module = name.replace("-", "_")
    folder = parent / module
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name, or another --path")
    words = {
        "dash": name.replace("_", "-"),
        "module": module,
        "prefix": "".join(part.capitalize() for part in module.split("_")),
        "folder": folder,
    }
    texts = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{module}/__init__.py": EXPORTS,
        f"{module}/taskset.py": TASKSET,
        f"{module}/oracle.py": ORACLE,
    }
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(**words), encoding="utf-8")
    return folder
