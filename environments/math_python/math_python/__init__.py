"""math-python: solve a problem with Python at hand, over as many turns as it takes.

1. The model has one tool, `python(code)`: a session of its own that lives as long as the rollout, in a
   limited process of this machine (math_python.nursery says what it may and may not do).
2. The reward is 1 where the last \\boxed{...} of the last answer is the expected answer, else 0. A last
   answer that a limit cut, or that still thinks, has none.
3. Problems are generated from `seed`, with answers that were computed; or they come from a file or from a
   dataset of the hub.
4. `max_turns` model calls end a rollout; what stands then is judged.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from math_python.answers import same_answer
from math_python.hub import read_rows
from math_python.problems import Problem, problems
from math_python.server import PythonConfig, PythonState, PythonToolset, close
from math_python.sessions import Limits

INSTRUCTION_PROMPT = (
    "Solve the following math problem. Explain your reasoning and put the final answer in \\boxed{}. "
    "Use Python for all calculations."
)


class MathPythonData(vf.TaskData):
    """One problem."""

    answer: str
    max_turns: int


class MathPythonTask(vf.Task[MathPythonData, PythonState]):
    """Judges the final answer, ends the session."""

    @vf.stop
    async def max_turns_reached(self, trace: vf.Trace) -> bool:
        """Whether the model had its turns."""
        return trace.num_turns >= self.data.max_turns

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """The rollout is over: end its Python session."""
        await close(trace.state)

    @vf.reward(weight=1.0)
    async def correct_answer(self, trace: vf.Trace) -> float:
        """Whether the boxed answer is right."""
        reply = trace.last_reply
        if trace.is_truncated or ("<think>" in reply and "</think>" not in reply):
            return 0.0
        boxed = vf.extract_boxed_answer(reply.rpartition("</think>")[2], strict=True)
        return float(same_answer(boxed, self.data.answer))

    @vf.metric
    async def python_calls(self, trace: vf.Trace) -> float:
        """Calls of the tool."""
        return float(sum(len(message.tool_calls or ()) for message in trace.assistant_messages))

    @vf.metric
    async def python_errors(self, trace: vf.Trace) -> float:
        """Calls whose code raised, or was stopped."""
        return float(trace.state.errors)


class MathPythonConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    split: Literal["train", "eval"] = "train"
    num_train: int = Field(default=2000, ge=1, le=1_000_000)
    num_eval: int = Field(default=200, ge=0, le=100_000)
    seed: int = 42
    problems: Literal["mixed", "arithmetic"] = "mixed"
    digits: int = Field(default=2, ge=1, le=12)
    """Of the numbers in arithmetic problems."""
    difficulty: Literal["easy", "hard"] | None = None
    """Of mixed problems; left out: both."""
    dataset_name: str = ""
    """A JSON Lines file, or a dataset of the hub; empty: problems are generated."""
    dataset_subset: str | None = None
    dataset_split: str = "train"
    eval_split: str | None = None
    """Of a dataset of the hub: what to evaluate with, instead of its last `num_eval` rows."""
    question_key: str = "question"
    answer_key: str = "answer"
    shuffle: bool = False
    difficulty_key: str | None = None
    min_avg_reward: float = 0.0
    max_avg_reward: float = 1.0
    max_turns: int = Field(default=100, ge=1)
    instruction_prompt: str = INSTRUCTION_PROMPT
    pip_install_packages: str = "numpy sympy"
    """Packages that sessions have at hand; nothing is installed, they must be there."""
    sandbox_timeout_per_command_seconds: float = Field(default=60.0, gt=0)
    sandbox_memory_gb: float = Field(default=2.0, ge=0.0625, le=1024)
    sandbox_timeout_minutes: float = Field(default=60.0, gt=0)
    """Idle time after which a session that nobody ended is ended."""
    sandbox_cpu_seconds: int = Field(default=600, ge=1)
    max_output_length: int = Field(default=8192, ge=1, le=1_000_000)
    max_sessions: int = Field(default=384, ge=1, le=4096)
    """Each is a process, and a worker may have 512 by default. Rollouts that failed leave theirs idle."""
    require_isolation: bool = False
    """Refuse to run where the kernel gives no namespaces."""

    @model_validator(mode="after")
    def _packages_are_there(self) -> Self:
        for package in self.pip_install_packages.split():
            if importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"pip_install_packages names {package!r}, which this interpreter does not have"
                )
        return self

    @model_validator(mode="after")
    def _is_about_these_problems(self) -> Self:
        if self.difficulty and self.dataset_name:
            raise ValueError("difficulty is of generated problems; give difficulty_key, min_avg_reward, ...")
        if self.difficulty and self.problems != "mixed":
            raise ValueError('difficulty is of problems = "mixed"; give digits')
        # Of what has no splits of its own a part is held out, which may be called as anywhere.
        if self.eval_split not in (None, "eval", "test") and not self.from_hub:
            raise ValueError(
                'eval_split names a split of a dataset of the hub; else it is "test", or left out'
            )
        return self

    @property
    def from_hub(self) -> bool:
        """Whether the problems are those of a dataset of the hub."""
        return bool(self.dataset_name) and not Path(self.dataset_name).is_file()

    @property
    def tool(self) -> PythonConfig:
        """The tool server's settings."""
        limits = Limits(
            packages=self.pip_install_packages.split(),
            call_seconds=self.sandbox_timeout_per_command_seconds,
            cpu_seconds=self.sandbox_cpu_seconds,
            memory_bytes=int(self.sandbox_memory_gb * 2**30),
            output_chars=self.max_output_length,
            max_sessions=self.max_sessions,
            idle_seconds=self.sandbox_timeout_minutes * 60,
        )
        return PythonConfig(limits=limits, require_isolation=self.require_isolation)


class MathPythonTaskset(vf.Taskset[MathPythonTask, MathPythonConfig]):
    """Problems, and the tool they share."""

    @classmethod
    def toolsets(cls, config: MathPythonConfig) -> list[vf.Toolset]:
        """One server for all rollouts of a worker."""
        return [PythonToolset(config.tool)]

    def load(self) -> Iterator[MathPythonTask]:
        """The problems of the configured split."""
        config = self.config
        head = [config.instruction_prompt]
        if config.pip_install_packages:
            packages = ", ".join(config.pip_install_packages.split())
            head.append(f"In addition to the Python standard library, you have access to: {packages}.")
        for problem in self._problems():
            prompt = "\n\n".join([part for part in head if part] + [problem.question])
            data = MathPythonData(prompt=prompt, answer=problem.answer, max_turns=config.max_turns)
            yield MathPythonTask(data, config.task)

    def _problems(self) -> list[Problem]:
        config = self.config
        train = config.split == "train"
        if config.from_hub and config.eval_split:
            split, count = (
                (config.dataset_split, config.num_train) if train else (config.eval_split, config.num_eval)
            )
            return [Problem(*row) for row in read_rows(config, split)][:count]
        if config.dataset_name:
            given = [Problem(*row) for row in read_rows(config, config.dataset_split)]
            cut = max(0, len(given) - config.num_eval)
            held_out = given[cut:]
            asked = {problem.question for problem in held_out}
            rest = [problem for problem in given if problem.question not in asked]
            if not rest:
                raise ValueError(
                    f"dataset_name = {config.dataset_name!r} has {len(given)} problems; with "
                    f"num_eval = {config.num_eval} none are left to train on"
                )
            return rest[: config.num_train] if train else held_out
        held_out = self._generated("eval", config.num_eval, set())
        return self._generated("train", config.num_train, set(held_out)) if train else held_out

    def _generated(self, stream: str, count: int, without: set[Problem]) -> list[Problem]:
        """Problems of a stream of their own, without those of the other split.

        None comes twice before all have come that can be found.
        """
        rng = random.Random(f"{self.config.seed}:{stream}")
        made = problems(self.config.problems, self.config.digits, rng, self.config.difficulty)
        # Small problems run out; that so many more are drawn in vain means that they have.
        drawn = itertools.islice(made, 20 * count + 1000)
        taken = set(without)
        fresh = (problem for problem in drawn if problem not in taken and not taken.add(problem))
        found = list(itertools.islice(fresh, count))
        if count and not found:
            raise ValueError(f"too few different problems for num_{stream} = {count}; raise digits")
        return list(itertools.islice(itertools.cycle(found), count))


__all__ = ["MathPythonTaskset"]
