"""Rollouts asked of a host that goes away, and the questions of an endpoint."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from quartet.cli.eval import rollouts
from quartet.cli.eval.config import EvalFileConfig, Trial
from quartet.cli.eval.openai_policy import parameters, wire_message
from quartet.cli.eval.rollouts import ATTEMPTS, play, tasks_of
from quartet.config import validate
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.common_pb2 import Message, SamplingParams, ToolCall, ToolDefinition
from quartet.v1.rollout_pb2 import FAILURE_KIND_HOST, Rollout, Task


class Call:
    """A stream of frames that may end in an error."""

    def __init__(self, frames: list[Any], error: QuartetError | None, host: Host, members: int) -> None:
        self._frames, self._error = iter(frames), error
        self._host, self._members = host, members

    async def read(self) -> Any:
        await (self._host.holds() if self._error is None else asyncio.sleep(0))
        frame = next(self._frames, None)
        if frame is None:
            self._host.running -= self._members
        if frame is None and self._error is not None:
            raise self._error
        return grpc.aio.EOF if frame is None else frame

    def cancel(self) -> None:
        """Nothing is held."""


class Host:
    """Ends each member once, and breaks off as it is told."""

    def __init__(self, breaks: Any) -> None:
        self.breaks = breaks
        self.holds: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
        self.requests: list[pb.RunRolloutsRequest] = []
        self.running = self.most = self.waited_for = 0

    def RunRollouts(self, request: pb.RunRolloutsRequest) -> Call:
        self.requests.append(request)
        members = list(request.members)
        kept, error = self.breaks(members)
        self.running += len(members)
        self.most = max(self.most, self.running)
        frames = [pb.RunRolloutsResponse(rollout=Rollout(member=one)) for one in kept]
        return Call(frames, error, self, len(members))

    async def DescribeEnvironment(self, request: Any, *, wait_for_ready: bool, **_: Any) -> Any:
        assert wait_for_ready
        self.waited_for += 1
        return pb.DescribeEnvironmentResponse()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = RetryBudget(initial_backoff_s=0.001, max_backoff_s=0.002)
    monkeypatch.setattr(rollouts, "RetryBudget", lambda: quick)


def trial(group: int, at_once: int) -> Trial:
    tables = {"rollouts_per_example": group, "max_concurrent": at_once, "eval": [{"id": "e"}]}
    return validate(EvalFileConfig, tables).trials[0]


async def played(host: Host, one: Trial, tasks: int, *, whole: bool = False) -> list[tuple[int, Rollout]]:
    found: list[tuple[int, Rollout]] = []
    members = range(one.rollouts_per_example)
    await play(
        host, one, {index: members for index in range(tasks)}, [Task(index=index) for index in range(tasks)],
        lambda task, rollout: found.append((task.index, rollout)), whole_groups=whole,
    )  # fmt: skip
    return found


AWAY = QuartetError("NOT_READY", "the host went away")


async def test_every_member_ends_once_whatever_breaks_off() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)

    def breaks(members: list[int]) -> tuple[list[int], QuartetError | None]:
        kept = members[: draw.randint(0, len(members))]
        return kept, AWAY if len(kept) < len(members) or draw.random() < 0.1 else None

    for _ in range(40):
        group, tasks = draw.randint(1, 6), draw.randint(1, 5)
        for whole in (False, True):
            host = Host(breaks)
            found = await played(host, trial(group, draw.randint(1, 8)), tasks, whole=whole)
            keys = Counter((index, rollout.member) for index, rollout in found)
            assert keys == {(index, member): 1 for index in range(tasks) for member in range(group)}
            if whole:
                assert all(len(request.members) == group for request in host.requests)


async def test_a_host_that_is_full_of_them_is_asked_until_it_has_a_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rollouts.py 3"""
    refused_often = asyncio.Event()

    def breaks(members: list[int]) -> tuple[list[int], QuartetError | None]:
        if len(host.requests) == 2 * ATTEMPTS:
            refused_often.set()
        return ([], QuartetError("OVERLOADED", "full")) if host.running else (members, None)

    async def holds() -> None:
        await asyncio.wait_for(refused_often.wait(), 20)

    host = Host(breaks)
    host.holds = holds
    found = await played(host, trial(1, 2), 2)
    assert len(found) == 2 and not any(rollout.HasField("failure") for _, rollout in found)
    assert capsys.readouterr().err == "", "not for long"
    monkeypatch.setattr(rollouts, "FULL_SECONDS", 0.0)
    host, refused_often = Host(breaks), asyncio.Event()
    host.holds = holds
    await played(host, trial(1, 2), 2)
    told = capsys.readouterr().err
    assert told == "the host is full, waiting for a place there: OVERLOADED: full\n", "once"
    host = Host(lambda members: ([], QuartetError("OVERLOADED", "full of others' rollouts")))
    async with asyncio.timeout(20):
        found = await played(host, trial(1, 8), 8)
    assert all(rollout.failure.kind == FAILURE_KIND_HOST for _, rollout in found)
    assert len(host.requests) == 8 * ATTEMPTS, "nor do those count that are being refused themselves"


async def test_a_host_that_stays_away_is_a_failure_of_its_own_kind_and_a_refusal_ends_everything() -> None:
    host = Host(lambda members: (members[:1], AWAY))
    found = await played(host, trial(3, 3), 1)
    assert [rollout.HasField("failure") for _, rollout in found] == [False, False, False]
    host = Host(lambda members: ([], AWAY))
    (first, *_) = found = await played(host, trial(2, 2), 1)
    assert len(found) == 2 and len(host.requests) == ATTEMPTS
    assert first[1].failure.kind == FAILURE_KIND_HOST and "went away" in first[1].failure.message
    assert len({request.request_id for request in host.requests}) == ATTEMPTS
    refused = Host(lambda members: ([], QuartetError("INVALID_CONFIG", "no such argument")))
    with pytest.raises(QuartetError, match="no such argument"):
        await played(refused, trial(1, 2), 5)


async def test_a_host_that_is_started_again_is_waited_for_and_no_rollout_is_lost() -> None:
    def breaks(members: list[int]) -> tuple[list[int], QuartetError | None]:
        return (members, None) if host.waited_for else ([], AWAY)

    host = Host(breaks)
    found = await played(host, trial(2, 4), 50)
    assert len(found) == 100 and not any(rollout.HasField("failure") for _, rollout in found)
    assert host.waited_for <= 2, "by those that were under way"


async def test_promise_2_no_more_rollouts_are_under_way_than_may_be() -> None:
    for group, at_once, whole, most in (
        (8, 3, False, 3), (2, 7, False, 6), (5, 5, False, 5), (8, 3, True, 8), (1, 2**32 - 1, False, 4),
    ):  # fmt: skip
        host = Host(lambda members: (members, None))
        await played(host, trial(group, at_once), 4, whole=whole)
        assert host.most == most


def test_a_question_is_a_chat_completion() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=2, temperature=0.0, top_k=4, stop=["x"], seed=3)
    tool = ToolDefinition(name="t", description="d", parameters_json='{"type": "object"}')
    asked = parameters(pb.ModelQuestion(sampling=sampling, tools=[tool]))
    assert asked["tools"] == [
        {"type": "function", "function": {"name": "t", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert {key: value for key, value in asked.items() if key != "tools"} == {
        "max_completion_tokens": 9, "temperature": 0.0, "stop": ["x"], "seed": 3,
        "extra_body": {"top_k": 4, "min_tokens": 2},
    }  # fmt: skip
    call = ToolCall(id="1", name="t", arguments_json='{"a": 1}')
    wire = wire_message(Message(role="assistant", tool_calls=[call]))
    assert json.loads(wire["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    answer = wire_message(Message(role="tool", content="2", tool_call_id="1"))
    assert answer == {"role": "tool", "content": "2", "tool_call_id": "1"}
    shown = wire_message(
        Message(role="user", parts=[{"text": "what?"}, {"image_url": "data:image/gif;base64,R0"}])
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0"}}
    assert shown == {"role": "user", "content": [{"type": "text", "text": "what?"}, image]}


async def test_an_environment_may_load_for_as_long_as_its_host_allows() -> None:
    """`[envhost] load_timeout_seconds = 1800`, and three starts until it is given up."""
    left: list[float] = []

    class Slow:
        async def DescribeEnvironment(self, request: Any, **options: Any) -> Any:
            left.append(options["timeout"])
            return pb.DescribeEnvironmentResponse()

        async def GetTasks(self, request: Any, **options: Any) -> Any:
            left.append(options["timeout"])
            return pb.GetTasksResponse(tasks=[Task()])

    assert len(await tasks_of(Slow(), trial(1, 1))) == 1
    assert len(left) == 2 and min(left) > 1800
