"""The oracle of an environment: the module `oracle` of its package, with

    def answer(task: dict, messages: list[dict]) -> str | dict

`task` is the example's data, `messages` the conversation so far; the result is the next message's text, or
`{"content": "...", "tool_calls": [{"name": "...", "arguments": {...}}]}`. Where a right answer earns
something else than 1, the module says so: `FULL_REWARD = 1.7`.

1. It runs in the environment's interpreter, in a process of its own, one question after the other.
2. What it raises fails the rollout that asked, with its words.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

from quartet.cli.env.installed import FIND_SECONDS
from quartet.config import ConfigError
from quartet.local.child import child_environment
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as pb

# A line is a question: {"task", "messages"}; the answer is a line: {"content", "tool_calls"} or {"error"}.
SERVE = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the package prints is no answer
answer = importlib.import_module(sys.argv[1] + ".oracle").answer
for line in sys.stdin:
    asked = json.loads(line)
    try:
        said = answer(asked["task"], asked["messages"])
        said = {"content": said} if isinstance(said, str) else dict(said)
        line = json.dumps({"content": "", "tool_calls": [], **said})
    except Exception as error:
        line = json.dumps({"error": f"{type(error).__name__}: {error}"})
    print(line, file=out, flush=True)
"""
# What the oracle says that a right answer earns; exit code NONE where there is no oracle.
NONE = 3
FULL = """
import importlib, importlib.util, sys
name = sys.argv[1] + ".oracle"
if importlib.util.find_spec(name) is None:
    sys.exit(3)
print(float(getattr(importlib.import_module(name), "FULL_REWARD", 1.0)))
"""
#: An answer is a function of its arguments; importing Verifiers comes before the first.
ANSWER_SECONDS = 120.0
#: One line: a conversation with its example, as a message of the contract bounds it.
LINE_BYTES = 8 << 20
#: What a wrong answer says.
WRONG = "I do not know."


def full_reward(module: str, python: str) -> float | None:
    """What the package's oracle is to earn; None where it has no oracle. Raises ConfigError."""
    done = subprocess.run(
        [python, "-c", FULL, module], capture_output=True, text=True, timeout=FIND_SECONDS, check=False
    )
    if done.returncode == 0:
        return float(done.stdout.split()[-1])
    if done.returncode == NONE:
        return None
    why = (done.stderr.strip().splitlines() or ["it ended"])[-1]
    raise ConfigError(f"{module}.oracle cannot be imported: {why}")


class Oracle:
    """The process. Use as an async context manager; `tasks` tells it the examples."""

    def __init__(self, module: str, python: str) -> None:
        """Nothing runs yet."""
        self._command = [python, "-c", SERVE, module]
        self._asking = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._data: dict[str, Any] = {}
        #: Set to play a policy that knows nothing.
        self.wrong = False

    async def __aenter__(self) -> Oracle:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            limit=LINE_BYTES,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def playing(self, data: dict[str, Any]) -> None:
        """The example of the questions to come."""
        self._data = data

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        """The next message. Raises ConfigError where the oracle cannot say it."""
        said: dict[str, Any] = {"content": WRONG, "tool_calls": []}
        if not self.wrong:
            said = await self._ask(question)
        message = common_pb2.Message(role="assistant", content=said["content"])
        for number, call in enumerate(said["tool_calls"]):
            message.tool_calls.add(
                id=f"call_{len(question.messages)}_{number}",
                name=call["name"],
                arguments_json=json.dumps(call["arguments"]),
            )
        # It has no tokens: one of each is what the contract asks for at least.
        return pb.ModelAnswer(prompt_token_ids=[0], token_ids=[0], logprobs=[0.0], message=message)

    async def _ask(self, question: pb.ModelQuestion) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        messages = [_plain(one) for one in question.messages]
        async with self._asking, asyncio.timeout(ANSWER_SECONDS):
            process.stdin.write(json.dumps({"task": self._data, "messages": messages}).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        said = json.loads(line) if line else {"error": "its process ended; see what it printed above"}
        if "error" in said:
            raise ConfigError(f"the oracle failed: {said['error']}")
        return said


def _plain(message: common_pb2.Message) -> dict[str, Any]:
    calls = [{"name": one.name, "arguments": one.arguments_json} for one in message.tool_calls]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}
