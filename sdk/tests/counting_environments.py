"""An environment of a script that counts, and conversations with it over gRPC."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from quartet.v1 import reward_service_pb2 as pb
from served_rewards import Client


class Counter:
    """Counts how often it is called."""

    made: ClassVar[list[Counter]] = []
    told: Any = " Begin."

    def __init__(self) -> None:
        self.made.append(self)
        self.count, self.resets = -1, 0

    def reset(self, prompt: Any, answer: str, **columns: Any) -> Any:
        assert prompt[0]["content"] == f"question {answer}" and not columns
        prompt[0]["content"] = answer = ""
        self.count, self.resets = 0, self.resets + 1
        return self.told

    def get_reward(self) -> float:
        return self.count / 10

    def add(self, n: int) -> int:
        """Adds.

        Args:
            n: How many; 0 is an error.
        """
        if not n:
            raise ValueError("no zero")
        self.count += n
        return self.count

    async def later(self) -> str:
        """Looks."""
        return f"has {self.count}"

    def _hidden(self) -> str:
        """Nobody calls it."""
        return ""


def calls(*made: tuple[str, str]) -> common_pb2.Message:
    """An answer with these calls."""
    found = [
        common_pb2.ToolCall(id=f"c{at}", name=name, arguments_json=arguments)
        for at, (name, arguments) in enumerate(made)
    ]
    return common_pb2.Message(role="assistant", tool_calls=found)


ADDS = calls(("add", '{"n": 2}'))
ENDS = common_pb2.Message(role="assistant", content="done")


def begin(client: Client, index: int = 0, attempt: str = "a", member: int = 0, **more: Any) -> str:
    asked = pb.OpenRequest(run_id="run", index=index, request_id=attempt, member=member, **more)
    return str(client._ask(client.stub.Open, asked).text)


def proceed(client: Client, *messages: Any, index: int = 0, attempt: str = "a", member: int = 0) -> list[str]:
    found = client.proceed(index, messages, request_id=attempt, member=member)
    return [one.content for one in found.messages]


def refusal(call: Any) -> QuartetError:
    with pytest.raises(QuartetError) as caught:
        call()
    return caught.value


def ones(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)
