"""The oracle of an environment: the module `oracle` of its package, or beside an environment that is a single
module, `my_env.py`, the module `my_env_oracle`; with

    def answer(task: dict, messages: list[dict]) -> str | dict

`task` is the example's data, `messages` the conversation so far; the result is the next message's text, or
`{"content": "...", "tool_calls": [{"name": "...", "arguments": {...}}]}`. Where a right answer earns
something else than 1, the module says so: `FULL_REWARD = 1.7`.

1. It runs in the environment's interpreter, in a process of its own, one question after the other.
2. What it raises fails the rollout that asked, with its words.
3. An answer belongs to its question: that of a question which was given up, by a rollout that ended or by one
   that waited too long, is passed over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import Any

from quartet.cli.env.installed import ALONE, run_in
from quartet.config import ConfigError
from quartet.local.child import child_environment
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as pb

# Its first line is {"full_reward"}. Then each line is a question, {"number", "task", "messages"}, and is
# answered by a line, {"number"} with {"content", "tool_calls"} or {"error"}.
SERVE = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the package prints is no answer
oracle = importlib.import_module(sys.argv[1])
print(json.dumps({"full_reward": float(getattr(oracle, "FULL_REWARD", 1.0))}), file=out, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        said = oracle.answer(asked["task"], asked["messages"])
        said = {"content": said} if isinstance(said, str) else dict(said)
        line = json.dumps({"content": "", "tool_calls": [], **said, "number": asked["number"]})
    except Exception as error:
        line = json.dumps({"error": f"{type(error).__name__}: {error}", "number": asked["number"]})
    print(line, file=out, flush=True)
"""
# Prints the name of the oracle's module; exit code 0 where it is there. Looks without importing the package,
# and Verifiers with it.
FIND = """
import importlib.util, pathlib, sys
folders = importlib.util.find_spec(sys.argv[1]).submodule_search_locations
if folders is None:
    print(name := sys.argv[1] + "_oracle")
    sys.exit(importlib.util.find_spec(name) is None)
print(sys.argv[1] + ".oracle")
sys.exit(not any(pathlib.Path(one, "oracle.py").is_file() for one in folders))
"""
# Prints what it says.
FULL = """
import importlib, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print(float(getattr(importlib.import_module(sys.argv[1]), "FULL_REWARD", 1.0)), file=out)
"""
#: An answer is a function of its arguments; importing Verifiers comes before the first.
ANSWER_SECONDS = 120.0
#: One line: a conversation with its example, as a message of the contract bounds it.
LINE_BYTES = 8 << 20
#: What a wrong answer says.
WRONG = "I do not know."


def find_oracle(module: str, python: str) -> tuple[str, bool]:
    """The module that is the oracle of an environment's, and whether it is there; the environment's is."""
    looked = run_in(python, FIND, module)
    return looked.stdout.strip(), looked.returncode == 0


def full_reward_of(module: str, python: str) -> float:
    """What a right answer earns, as the environment's oracle says it: 1 where it says nothing, or is not.

    Raises ConfigError where it cannot be read, or is nothing that a reward can be a share of.
    """
    oracle, there = find_oracle(module, python)
    if not there:
        return 1.0
    said = run_in(python, FULL, oracle)
    if said.returncode != 0:
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{oracle} cannot be read: {last}; mend it, or give --full-reward")
    return _positive(oracle, float(said.stdout))


def _positive(oracle: str, full: float) -> float:
    if not 0 < full < math.inf:
        raise ConfigError(f"{oracle}: FULL_REWARD = {full:g} is refused; set it to what a right answer earns")
    return full


class Oracle:
    """The process. Use as an async context manager; `playing` tells it the example."""

    def __init__(self, module: str, python: str) -> None:
        """Of an oracle's module. Nothing runs yet."""
        self._command = [python, *ALONE, SERVE, module]
        self._asking = asyncio.Lock()
        self._numbers = itertools.count()
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._data: dict[str, Any] = {}
        #: What a right answer earns.
        self.full_reward = 1.0
        #: Set to play a policy that knows nothing.
        self.wrong = False
        #: It may fail at one question and answer the next.
        self.fatal: ConfigError | None = None

    async def __aenter__(self) -> Oracle:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            limit=LINE_BYTES,
        )
        try:
            said = await self._line(self._process)
            self.full_reward = _positive(self._module, float(said["full_reward"]))
        except BaseException:
            await self.__aexit__()
            raise
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
        assert process is not None and process.stdin is not None
        messages = [_plain(one) for one in question.messages]
        async with self._asking:
            number = next(self._numbers)
            asked = {"number": number, "task": self._data, "messages": messages}
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
            while (said := await self._line(process))["number"] != number:
                pass
        if "error" in said:
            raise ConfigError(f"the oracle failed: {said['error']}")
        return said

    async def _line(self, process: asyncio.subprocess.Process) -> Any:
        """The next line of its process. Raises ConfigError."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ConfigError(f"{self._module} said nothing for {ANSWER_SECONDS:.0f} s") from None
        if not line:
            raise ConfigError(f"the process of {self._module} ended; see what it printed above")
        return json.loads(line)


def _plain(message: common_pb2.Message) -> dict[str, Any]:
    calls = [{"name": one.name, "arguments": one.arguments_json} for one in message.tool_calls]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}
