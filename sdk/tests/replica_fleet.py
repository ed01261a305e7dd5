"""What the tests of quartet.replicas share: scripted replicas, a client of them, what is asked of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget
from quartet.replicas import Replicas, Settings
from quartet.replicas.choice import ranking
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from scripted_replica import ScriptedReplica, logprob

# Nobody is given up for his silence: a busy machine holds an answer back for longer than a test would wait.
QUICK = Settings(
    idle_timeout_seconds=30.0,
    resolve_seconds=0.1,
    rounds=RetryBudget(max_attempts=50, initial_backoff_s=0.02, max_backoff_s=0.1),
)
# For tests of who is silent for good: that another one is held to be so changes nothing there.
IMPATIENT = QUICK.model_copy(update={"idle_timeout_seconds": 0.5})


@asynccontextmanager
async def begun(count: int) -> AsyncIterator[list[Any]]:
    """Scripted replicas that nobody has spoken to yet."""
    scripted = [ScriptedReplica() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for one in scripted:
            await one.begin()
            stack.push_async_callback(one.end)
        yield scripted


@asynccontextmanager
async def fleet(
    count: int, settings: Settings = QUICK, *, settled: bool = True
) -> AsyncIterator[tuple[list[Any], Replicas]]:
    """Scripted replicas and a client of them; `settled` once all are in service."""
    async with (
        begun(count) as scripted,
        Replicas([one.address for one in scripted], settings=settings) as replicas,
    ):
        if settled:
            await until(lambda: len(replicas.in_service) == count)
        yield scripted, replicas


def ask(text: str = "hello", session: str = "s", max_tokens: int = 22, **fields: Any) -> pb.GenerateRequest:
    sampling = {"max_tokens": max_tokens, **fields.pop("sampling", {})}
    return pb.GenerateRequest(
        messages=pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content=text)]),
        sampling=common_pb2.SamplingParams(**sampling),
        session_id=session,
        **fields,
    )


def home(session: str, scripted: list[Any]) -> tuple[Any, list[Any]]:
    """The replica that a session ranks first, and the others in their order."""
    by_address = {one.address: one for one in scripted}
    first, *others = [by_address[one] for one in ranking(session, list(by_address))]
    return first, others


def at(sampled: int, action: Callable[[], Any]) -> Callable[[int], Any]:
    """A script that acts once, when so many tokens are sampled."""
    left = [action]

    def before(now: int) -> Any:
        return left.pop()() if now >= sampled and left else None

    return before


def fails(reason: str, **metadata: Any) -> Callable[..., Any]:
    """An action, or a script, that raises."""

    def action(*_sampled: int) -> Any:
        raise QuartetError(reason, "scripted", **metadata)

    return action


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks
            await asyncio.sleep(0.01)


def check(generated: Any, text: str, wanted: list[int]) -> None:
    """The answer is exactly the undisturbed one."""
    assert generated.prompt_ids == [ord(c) for c in text]
    (completion,) = generated.completions
    assert completion.token_ids == wanted
    assert completion.logprobs == [logprob(token) for token in wanted]
    assert [start for start, _, _ in completion.spans] == [
        sum(length for _, length, _ in completion.spans[:i]) for i in range(len(completion.spans))
    ]
    assert sum(length for _, length, _ in completion.spans) == len(wanted)
    assert completion.message.content == " ".join(map(str, wanted))
    assert completion.usage.prompt_tokens == len(text)
    assert completion.usage.completion_tokens == len(wanted)
