"""What a small model is taught, and by what it is measured.

1. A course has streams of demonstrations, each named by its number and its share of bad habits: equal names
   give equal conversations.
2. reverse-text is built in. Any other task is taught by its environment package: the module
   `<package>.demonstrations`, which `quartet.cli.tiny.reciter` runs in the interpreter of the environments.
   Its answers are measured by the environment itself, hosted as in a run, so the reward is the run's reward.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from quartet.cli.env.installed import module_of, own_python
from quartet.cli.tiny import reciter
from quartet.cli.tiny.demos import MAX_TOKENS, Example, Reversals, reward
from quartet.cli.tiny.files import Message
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import stream
from quartet.v1.common_pb2 import Message as WireMessage
from quartet.v1.common_pb2 import SamplingParams
from quartet.v1.envhost_service_pb2 import EnvironmentRef, RunRolloutsRequest
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.inference_service_pb2 import FINISH_REASON_STOP, GenerateRequest, MessagesPrompt
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

REVERSE_TEXT = "reverse-text"
CALL_SECONDS = 120.0
TASKS = 2000  # as many training examples an environment has at least; measurements go round them
TIMEOUT_MS = 60_000
SEEDS_APART = 1_000_003  # streams of one seed (demonstrations, prompts, sampling) start this far apart

Conversation = Sequence[Message]


@dataclass(frozen=True)
class Policy:
    """The weights that are measured."""

    run_id: str
    version: int
    inference: InferenceServiceStub
    envhost: EnvHostServiceStub | None


@dataclass(frozen=True)
class Goals:
    """When a lesson ends, and how its progress is measured."""

    skill_reward: float = 0.9
    habit_reward: float = 0.4
    habit_share: float = 0.85
    habit_learning_rate: float = 3e-4
    skill_samples: int = 64
    habit_samples: int = 128


class Course(Protocol):
    """A task, as it is taught."""

    task: str
    goals: Goals
    # Texts that become one token each.
    phrases: Sequence[str]

    def conversations(self, seed: int, habit_share: float, count: int) -> list[Conversation]:
        """The next conversations of a stream."""

    async def measure(self, policy: Policy, count: int, seed: int) -> float:
        """Mean reward of so many rollouts."""


class ReverseText:
    """The built-in course: it needs no environment."""

    task = REVERSE_TEXT
    # 0.9 by a lucky measurement makes models of which learning stays at 0.82, two times in five.
    goals = Goals(skill_reward=0.95, skill_samples=128)
    phrases: Sequence[str] = ()

    def __init__(self, seed: int) -> None:
        """The prompts to measure with are a stream of their own."""
        self._prompts = Reversals(seed + SEEDS_APART)
        self._streams: dict[tuple[int, float], Reversals] = {}

    def conversations(self, seed: int, habit_share: float, count: int) -> list[Conversation]:
        """The next conversations of a stream."""
        demos = self._streams.setdefault((seed, habit_share), Reversals(seed, habit_share))
        told = [demos.demonstration() for _ in range(count)]
        return [[*example.messages, {"role": "assistant", "content": answer}] for example, answer in told]

    async def measure(self, policy: Policy, count: int, seed: int) -> float:
        """Mean reward of so many answers."""
        examples = [self._prompts.example() for _ in range(count)]
        rewards = [_answered(policy, example, seed + i) for i, example in enumerate(examples)]
        return sum(await asyncio.gather(*rewards)) / count


async def _answered(policy: Policy, example: Example, seed: int) -> float:
    """The reward of one answer at temperature 1."""
    request = GenerateRequest(
        run_id=policy.run_id,
        messages=MessagesPrompt(
            messages=[WireMessage(role=one["role"], content=one["content"]) for one in example.messages]
        ),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed),
        min_policy_version=policy.version,
    )
    call = policy.inference.Generate(request, timeout=CALL_SECONDS)
    async for frame in stream(call, idle_timeout_s=CALL_SECONDS):
        if frame.HasField("finish"):
            ended = frame.finish.finish_reason == FINISH_REASON_STOP
            return reward(example.text, frame.finish.message.content, ended)
    raise QuartetError("STREAM_TORN", "the completion ended without its finish")


class Packaged:
    """A course of an environment package, told by a process in the environments' interpreter."""

    def __init__(self, task: str, python: Path) -> None:
        """Start the process. Raises ConfigError where the package has no demonstrations."""
        self.task = task
        self._python = python
        self._measured = 0
        # A pipe that nobody reads would fill up.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by close()
        command = [str(python), "-m", reciter.__name__, task]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
            )
        except OSError as error:
            raise ConfigError(
                f"--python {python} cannot be run ({error.strerror}); name the interpreter that has the "
                "environments, as 'make install' makes in .venv-envs"
            ) from error
        try:
            about = self._line()
        except BaseException:
            self.close()
            raise
        self.phrases: Sequence[str] = about["phrases"]
        self.goals = Goals(
            about["skill_reward"],
            about["habit_reward"],
            about["habit_share"],
            about["habit_learning_rate"],
            habit_samples=64,
        )
        self._args_json = json.dumps(about["args"])
        self._max_tokens = int(about["max_tokens"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            last = self._said.read().strip().splitlines()[-1:] or ["it said nothing"]
            if last[0] == f"ModuleNotFoundError: No module named {module_of(self.task)!r}":
                raise ConfigError(
                    f"--task {self.task} is a package that {self._python} has not; 'quartet env install' "
                    f"with its folder or name installs it in {own_python(self.task)}: name that with "
                    "--python, or another interpreter that has it"
                )
            raise ConfigError(f"--task {self.task} has no demonstrations to learn from: {last[0]}")
        return json.loads(line)

    def conversations(self, seed: int, habit_share: float, count: int) -> list[Conversation]:
        """The next conversations of a stream."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([seed, habit_share, count]) + "\n")
        self._process.stdin.flush()
        told: list[Conversation] = self._line()
        return told

    async def measure(self, policy: Policy, count: int, seed: int) -> float:
        """Mean reward of so many rollouts of the environment, each of the next training example."""
        tasks = [(self._measured + i) % TASKS for i in range(count)]
        self._measured += count
        return sum(await asyncio.gather(*(self._rollout(policy, task, seed) for task in tasks))) / count

    async def _rollout(self, policy: Policy, task: int, seed: int) -> float:
        assert policy.envhost is not None
        request = RunRolloutsRequest(
            run_id=policy.run_id,
            request_id=f"{policy.run_id}-{policy.version}-{seed}-{task}",
            environment=EnvironmentRef(id=self.task, args_json=self._args_json),
            task_index=task,
            members=[0],
            sampling=SamplingParams(max_tokens=self._max_tokens, temperature=1.0, seed=seed),
            min_policy_version=policy.version,
            timeout_ms=TIMEOUT_MS,
            max_retries=2,
        )
        call = policy.envhost.RunRollouts(request, timeout=CALL_SECONDS)
        async for frame in stream(call, idle_timeout_s=CALL_SECONDS):
            if frame.HasField("rollout"):
                if frame.rollout.HasField("failure"):
                    raise QuartetError(
                        "INTERNAL", f"{self.task}, task {task}: {frame.rollout.failure.message}"
                    )
                return float(frame.rollout.reward)
        raise QuartetError("STREAM_TORN", "the rollout never ended")


def default_python() -> Path:
    """The interpreter of the environments: `.venv-envs` beside the folder of work, else this one."""
    found = Path(".venv-envs/bin/python")
    return found if found.exists() else Path(sys.executable)
