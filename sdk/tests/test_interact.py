"""quartet.interact: what a policy answers, and what the host is told where it does not (invariants 1, 2)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import pytest
from quartet.errors import LOST_STATUS, STATUS_KEY, QuartetError, refused, to_status
from quartet.interact import interact
from quartet.kit.call import stream, unary
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1 import envhost_service_pb2_grpc as rpc
from quartet.v1 import rollout_pb2

NAME = "quartet.v1.EnvHostService"


class Host(rpc.EnvHostServiceServicer):
    """Asks once for each member, and notes the answers."""

    def __init__(self) -> None:
        self.answers: dict[int, pb.ModelAnswer] = {}

    async def Interact(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:
        members = list((await anext(request_iterator)).run.members)
        for member in members:
            yield pb.InteractResponse(question=pb.ModelQuestion(call_id=member + 1, member=member))
        for _ in members:
            answer = (await anext(request_iterator)).answer
            self.answers[answer.call_id - 1] = answer
            yield pb.InteractResponse(rollout=rollout_pb2.Rollout(member=answer.call_id - 1))


class Refusing(rpc.EnvHostServiceServicer):
    """Refuses an answer while others are on their way."""

    async def Interact(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:
        members = list((await anext(request_iterator)).run.members)
        for member in members:
            yield pb.InteractResponse(question=pb.ModelQuestion(call_id=member + 1, member=member))
        await anext(request_iterator)
        raise refused("answer.logprobs", 1, "send log(p)")


async def test_what_a_host_refuses_is_told_while_answers_are_written() -> None:
    """call.py 4: where gRPC has lost it before it was there, that is said."""
    add: Any = rpc.add_EnvHostServiceServicer_to_server
    running = await start([Service(NAME, add, Refusing())], ServerConfig(), Health())
    stub: Any = rpc.EnvHostServiceStub
    reasons: Counter[str] = Counter()

    async def policy(question: pb.ModelQuestion) -> pb.ModelAnswer:
        await asyncio.sleep(0.001 * (question.member % 5))
        return pb.ModelAnswer(token_ids=[7], message={"content": "x" * 50_000})

    async def one(channel: Any, number: int) -> None:
        run = pb.RunRolloutsRequest(request_id=str(number), members=range(64))
        try:
            async for _ in interact(stub(channel), run, policy, timeout_s=60):
                pass
        except QuartetError as error:
            assert error.reason == "INVALID_REQUEST" or "gRPC lost why" in error.message, error
            reasons[error.reason] += 1

    async with connect(running.address) as channel:
        for first in range(0, 200, 10):
            await asyncio.gather(*(one(channel, first + number) for number in range(10)))
    await running.stop(0)
    print(reasons)
    assert reasons.total() == 200


class Replaced:
    """A call whose peer refused a message, as grpc.aio shows it: the status is told, and replaced at once."""

    def __init__(self, details: str) -> None:
        status = to_status(refused("answer.logprobs", 1, "send log(p)"))
        self.metadata = grpc.aio.Metadata((STATUS_KEY, status.SerializeToString()))
        self._details = details

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    async def details(self) -> str:
        return "answer.logprobs = 1 is refused"

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return self.metadata

    def __await__(self) -> Generator[Any, None, None]:
        return self.read().__await__()

    async def read(self) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, self._details)

    def cancel(self) -> None:
        """It has ended."""


async def test_a_status_that_was_replaced_is_what_is_raised() -> None:
    """call.py 4: and no other error is."""

    async def streamed(call: Replaced) -> None:
        _ = [one async for one in stream(call, idle_timeout_s=5, sends=True)]

    async def sent(call: Replaced) -> None:
        await unary(lambda _, **settings: call, iter(()), timeout_s=5)

    for details, reason in ((LOST_STATUS, "INVALID_REQUEST"), ("out of disk", "INTERNAL")):
        for way in (streamed, sent):
            with pytest.raises(QuartetError) as raised:
                await way(Replaced(details))
            assert raised.value.reason == reason
            assert raised.value.metadata.get("field", "") == (
                "answer.logprobs" if details == LOST_STATUS else ""
            )


async def asked(policy: Any, members: int) -> dict[int, pb.ModelAnswer]:
    host = Host()
    add: Any = rpc.add_EnvHostServiceServicer_to_server
    running = await start([Service(NAME, add, host)], ServerConfig(), Health())
    stub: Any = rpc.EnvHostServiceStub
    run = pb.RunRolloutsRequest(request_id="1", members=range(members))
    async with connect(running.address) as channel:
        rollouts = [one async for one in interact(stub(channel), run, policy, timeout_s=5)]
    await running.stop(0)
    assert sorted(one.member for one in rollouts) == list(range(members))
    return host.answers


async def test_whatever_a_policy_does_not_answer_is_told_to_the_host() -> None:
    async def policy(question: pb.ModelQuestion) -> pb.ModelAnswer | None:
        match question.member:
            case 0:
                return pb.ModelAnswer(token_ids=[7])
            case 1:
                raise RuntimeError("out of memory")
            case 2:
                batch = asyncio.get_running_loop().create_future()
                batch.cancel()
                return await batch
        return None

    answers = await asked(policy, 4)
    assert list(answers[0].token_ids) == [7] and not answers[0].error
    assert answers[1].error == "RuntimeError: out of memory"
    assert answers[2].error.startswith("CancelledError")
    assert answers[3].error.startswith("TypeError: ") and "ModelAnswer" in answers[3].error


async def test_one_answer_may_be_given_to_several_questions() -> None:
    both, cached = asyncio.Barrier(2), pb.ModelAnswer(token_ids=[7])

    async def policy(_: pb.ModelQuestion) -> pb.ModelAnswer:
        await both.wait()
        return cached

    answers = await asked(policy, 2)
    assert [list(answers[member].token_ids) for member in (0, 1)] == [[7], [7]]
    assert not cached.call_id, "it is the policy's own"


async def test_what_a_policy_raises_fits_into_a_message() -> None:
    """Invariant 2: whatever its text holds, and of any length."""

    async def policy(question: pb.ModelQuestion) -> pb.ModelAnswer:
        raise ValueError("half \ud800" if question.member == 0 else "a line\n" * 1_000_000)

    answers = await asked(policy, 2)
    assert answers[0].error == "ValueError: half ?"
    assert answers[1].error.startswith("ValueError: a line a line") and len(answers[1].error) <= 500
