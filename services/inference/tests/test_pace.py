"""Thousands of requests at once do not hold the event loop up."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.answering import Answerer
from quartet_inference.chat import Chat
from quartet_inference.pace import PER_ROUND, Pace
from quartet_inference.prompts import Prompts
from quartet_inference.updates import ServedNews

from .openai_door import Door
from .test_answering import Writing

MANY = 40 * PER_ROUND


class Rounds:
    """Counts the rounds of the loop, while entered."""

    def __init__(self) -> None:
        self.number = 0
        self._over = False

    def __enter__(self) -> Rounds:
        self._count()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True

    def _count(self) -> None:
        self.number += 1
        if not self._over:
            asyncio.get_running_loop().call_soon(self._count)


async def test_no_round_of_the_loop_gives_more_turns_than_it_may() -> None:
    """pace.py 1."""
    pace, works = Pace(), Counter[int]()
    with Rounds() as rounds:

        async def work(turns: int) -> None:
            for _ in range(turns):
                await pace.turn()
                works[rounds.number] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(work(1 + number % 3))
                if number % 100 == 0:
                    await asyncio.sleep(0)
    assert sum(works.values()) == sum(1 + number % 3 for number in range(MANY))
    assert max(works.values()) <= 2 * PER_ROUND
    assert sorted(works.values())[len(works) // 2] >= PER_ROUND, "and none of them is idle meanwhile"


async def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    """pace.py 2: also where some who wait have left."""
    pace, order = Pace(), list[int]()

    async def work(number: int) -> None:
        await pace.turn()
        order.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(MANY)]
    await asyncio.sleep(0)
    leaving = range(PER_ROUND, MANY, 3)
    for number in leaving:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [number for number in range(MANY) if number not in leaving]


async def test_a_turn_that_nobody_else_wants_is_there_at_once() -> None:
    """pace.py 2."""
    pace = Pace()
    with Rounds() as rounds:
        for _ in range(3):
            before = rounds.number
            for _ in range(PER_ROUND):
                await pace.turn()
            assert rounds.number == before
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def test_few_prompts_are_rendered_in_one_round_of_the_loop(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answering.py 3: of requests that come together, by gRPC as by the front."""
    engine: Any = Writing()
    answerer = Answerer(engine, Chat(model_folder), ServedNews(engine), 1.0)
    request = pb.GenerateRequest(messages={"messages": [{"role": "user", "content": "hi"}]})
    rendered = Counter[int]()
    original = Prompts.of
    with Rounds() as rounds:

        def counted(self: Prompts, request: pb.GenerateRequest) -> Any:
            rendered[rounds.number] += 1
            return original(self, request)

        monkeypatch.setattr(Prompts, "of", counted)

        async def ask() -> None:
            async for _ in answerer.answer(request, None):
                pass

        await asyncio.gather(*(ask() for _ in range(MANY)))
    assert sum(rendered.values()) == MANY
    assert max(rendered.values()) <= 2 * PER_ROUND


async def test_the_front_has_requests_wait_for_their_turn_and_questions_of_health_not(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """front.py 2: and whoever waits has a place."""
    asked, may_go_on = asyncio.Event(), asyncio.Event()

    async def turn(self: Pace) -> None:
        asked.set()
        await may_go_on.wait()

    monkeypatch.setattr(Pace, "turn", turn)
    # Refused as soon as it is parsed, which it is not before its turn.
    waiting = asyncio.create_task(door.refusal(model="another"))
    async with asyncio.timeout(30):
        await asked.wait()
    assert [one.id async for one in await door.plain.models.list()] == [door.model]
    assert not waiting.done() and door.under_way() == 1
    may_go_on.set()
    assert (await waiting)[0] == 400
