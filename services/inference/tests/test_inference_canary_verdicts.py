"""What a canary says of weights, and the gate that its verdicts open and close: by scripted engines.

Over the service: test_inference_canary.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet.inference import refusal
from quartet.v1 import weights_pb2 as pb
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import canary
from quartet_inference.adoption import Adopter
from quartet_inference.canary import CanaryWatch, Gate, check_canary
from quartet_inference.engine import EngineInfo, NonFiniteLogits, Scored, ScoreRequest, ServedWeights
from structlog.testing import capture_logs

TOKENS = [7 * place % 250 + 1 for place in range(48)]
Make = Callable[..., Any]
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [([1], []), ([1, 2], []), ([1, 260], [-1.0]), ([1] * 65, [-1.0] * 64)]
)
def test_malformed_canaries(tokens: list[int], logprobs: list[float]) -> None:
    manifest = pb.WeightManifest(canary=pb.Canary(token_ids=tokens, logprobs=logprobs))
    with pytest.raises(QuartetError, match="canary"):
        check_canary(manifest, vocab_size=260)
    check_canary(pb.WeightManifest(), vocab_size=260)


@pytest.mark.parametrize("count", [2, canary.MAX_TOKENS])
def test_canaries_of_every_length_and_token_are_taken(count: int) -> None:
    told = pb.Canary(token_ids=[259] * count, logprobs=[-1.0] * (count - 1))
    check_canary(pb.WeightManifest(canary=told), vocab_size=260)


class Scripted:
    """An engine that scores as told."""

    def __init__(self, *answers: list[float] | QuartetError) -> None:
        self.answers = list(answers)
        self.served: ServedWeights | None = None
        self.scored: list[ScoreRequest] = []

    def info(self) -> EngineInfo:
        return EngineInfo("", "float32", 64, 1, 1, (), self.served, 0, 0, 0, 0, 0.0, False)

    async def score(self, request: ScoreRequest) -> Scored:
        self.scored.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, QuartetError):
            raise answer
        return Scored(answer, request.exact_version or 0)

    async def generate(self, request: Any) -> AsyncIterator[int]:
        for event in range(100):
            await asyncio.sleep(0)
            yield event


async def verdicts(*answers: list[float] | QuartetError) -> list[str]:
    engine: Any = Scripted(*answers)
    told: list[str] = []
    watch = CanaryWatch(engine, None, told.append)
    watch.swapped(ServedWeights("r", 3, b""), pb.Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0]))
    assert watch._task is not None
    await asyncio.wait_for(watch._task, 30)
    assert engine.scored == [ScoreRequest((5, 6, 7), ((1, 2),), "r", 3, ahead=True)]
    return told


async def test_verdicts() -> None:
    assert await verdicts([-1.0004, -2.0004]) == [""]
    assert "0.05 off" in (await verdicts([-1.1, -2.0]))[0]
    for no_number in ([float("nan"), -2.0], NonFiniteLogits()):
        assert "of version 3 give log-probabilities that are no numbers" in (await verdicts(no_number))[0]
    assert await verdicts(QuartetError("VERSION_UNAVAILABLE", "swapped again")) == [], "nothing was found out"


async def test_a_check_that_fails_is_told_at_once() -> None:
    """asyncio would tell of it at the next swap, for which whoever waits for a verdict may wait in vain."""
    engine: Any = Scripted()
    watch = CanaryWatch(engine, None, lambda why: None)
    with capture_logs() as said:
        watch.swapped(ServedWeights("r", 3, b""), None)
        await asyncio.wait_for(watch.scored(), 30)
    assert [type(one["exc_info"]) for one in said if one["log_level"] == "error"] == [IndexError]


async def test_another_name_does_not_make_weights_right() -> None:
    """canary.py 2: as when the trainer skips a step, and the next version has equal weights."""
    engine: Any = Scripted([-1.1, -2.0], [-1.1, -2.0], [-1.0, -2.0])
    told: list[str] = []
    watch = CanaryWatch(engine, None, told.append)
    watch.swapped(ServedWeights("r", 3, b""), pb.Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0]))
    for version in (4, 5, 6):
        assert watch._task is not None
        await asyncio.wait_for(watch._task, 30)
        watch.renamed(ServedWeights("r", version, b""))
    await asyncio.wait_for(watch.scored(), 30)
    assert "of version 3" in told[0] and "of version 4" in told[1] and told[2:] == [""]
    assert len(engine.scored) == 3, "what is right is not asked again"


class Taking(Scripted):
    """One that takes whatever it is given, too."""

    async def stage(self, tensors: Any) -> Any:
        return tensors

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        pass


async def test_what_is_adopted_is_judged_by_what_it_was_published_in_and_anew_under_another_name() -> None:
    """canary.py 1 and 2, by way of updates.py; and whoever waits is told each time."""
    engine: Any = Taking([-1.05, -2.0], [-1.5, -2.0], [-1.05, -2.0])
    told: list[str] = []
    served: list[int] = []
    watch = CanaryWatch(engine, None, told.append)
    adopter = Adopter(engine, watch, lambda: served.append(len(told)))
    store, canary = WeightStore(keep=2), pb.Canary(token_ids=[0, 0, 0], logprobs=[-1.0, -2.0])
    for version, dtype, size in ((3, "F32", 4), (4, "BF16", 2)):
        store.publish("r", version, {"w": Tensor(dtype, (1,), bytes(size))}, canary=canary)
        weights = await adopter.adopt(store.get("r", version))
        await asyncio.wait_for(watch.scored(), 30)
    await adopter.rename(replace(weights, version=5))
    await asyncio.wait_for(watch.scored(), 30)
    assert "of version 3" in told[0] and "of version 4" in told[1] and told[2:] == [""]
    assert [one.exact_version for one in engine.scored] == [3, 4, 5] and served == [0, 1, 2]


async def test_what_is_scored_fits_the_engine_and_the_tolerance_is_the_one_that_is_given() -> None:
    """Of a version without a canary, too; of a canary that does not fit, what was scored is compared."""

    class Small(Scripted):
        def info(self) -> EngineInfo:
            return replace(super().info(), vocab_size=3, max_model_len=room)

    cases: list[tuple[int, float | None, pb.Canary | None, list[float], bool]] = [
        (64, None, None, [-9.0, -9.0], True),
        (2, None, pb.Canary(token_ids=[0, 1, 2], logprobs=[-1.0, -2.0]), [-1.0015], False),
        (2, 0.002, pb.Canary(token_ids=[0, 1, 2], logprobs=[-1.0, -2.0]), [-1.0015], True),
    ]
    for room, tolerance, given, answer, right in cases:
        engine: Any = Small(answer)
        told: list[str] = []
        watch = CanaryWatch(engine, tolerance, told.append)
        watch.swapped(ServedWeights("r", 3, b""), given)
        await asyncio.wait_for(watch.scored(), 30)
        assert engine.scored[0].tokens == (0, 1, 2)[:room] and (told == [""]) == right


async def test_what_was_renamed_or_had_no_room_is_judged_once_and_who_waits_waits_for_that() -> None:
    """canary.py 2 to 4: a check that is under way, or to be made again, goes with its version."""
    score = asyncio.Event()
    score.set()

    class Slow(Scripted):
        async def score(self, request: ScoreRequest) -> Scored:
            await score.wait()
            return await super().score(request)

    full = QuartetError("OVERLOADED", "no room")
    engine: Any = Slow([-1.0, -2.0], full, [-1.0, -2.0])
    told: list[str] = []
    watch = CanaryWatch(engine, None, told.append)
    right = pb.Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0])
    for version in (3, 4):  # of the second there is no verdict yet
        watch.swapped(ServedWeights("r", version, b""), right)
        assert watch._task is not None
        await asyncio.wait_for(asyncio.shield(watch._task), 30)
    again = watch._again
    score.clear()
    watch.swapped(ServedWeights("r", 5, b""), right)
    assert again is not None and again.cancelled()
    waiting = asyncio.create_task(watch.scored())
    await asyncio.sleep(0)  # it is being scored
    watch.renamed(ServedWeights("r", 6, b""))
    for _ in range(9):
        await asyncio.sleep(0)
    assert not waiting.done()
    score.set()
    await asyncio.wait_for(waiting, 30)
    assert told == ["", ""] and [one.exact_version for one in engine.scored] == [3, 4, 6]


@pytest.mark.parametrize("is_there", [False, True])
async def test_what_cannot_be_scored_now_is_scored_again_while_it_is_there(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """canary.py 5"""
    monkeypatch.setattr(canary, "AGAIN_SECONDS", 0.01)
    engine: Any = Scripted(QuartetError("NOT_READY", "for now"), [-1.0, -2.0])
    told: list[str] = []
    watch, weights = CanaryWatch(engine, None, told.append), ServedWeights("r", 3, b"")
    engine.served = weights if is_there else None
    watch.swapped(weights, pb.Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0]))
    await asyncio.sleep(0.3)
    assert told == ([""] if is_there else [])
    watch.close()


async def test_only_the_newest_swap_counts() -> None:
    """canary.py 3: what is found out of the one before would say it of other weights."""
    score = asyncio.Event()

    class Slow(Scripted):
        async def score(self, request: ScoreRequest) -> Scored:
            await score.wait()
            return Scored([-9.0 if request.exact_version == 3 else -1.0, -2.0], request.exact_version or 0)

    engine: Any = Slow()
    told: list[str] = []
    watch = CanaryWatch(engine, None, told.append)
    for version in (3, 4):
        watch.swapped(ServedWeights("r", version, b""), pb.Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0]))
        await asyncio.sleep(0)  # it is being scored
    score.set()
    await asyncio.wait_for(watch.scored(), 30)
    assert told == [""]


async def test_what_was_scored_while_the_gate_closed_is_not_told() -> None:
    class Closing(Scripted):
        async def score(self, request: ScoreRequest) -> Scored:
            gate.set_out_of_service("bad memory")
            return await super().score(request)

    engine: Any = Closing([-1.0])
    gate = Gate(engine)
    with pytest.raises(QuartetError, match="bad memory"):
        await gate.score(ScoreRequest((1, 2), ((1, 1),)))
    assert engine.scored


async def test_a_closed_gate_fails_what_runs_and_what_comes() -> None:
    engine: Any = Scripted()
    gate = Gate(engine)
    request: Any = ScoreRequest((1, 2), ((1, 1),))
    events = gate.generate(request)
    async with aclosing(events):  # type: ignore[type-var]
        assert await anext(events) == 0
        gate.set_out_of_service("bad memory")
        assert gate.info().out_of_service == "bad memory"
        with pytest.raises(QuartetError, match="bad memory"):
            await anext(events)
    with pytest.raises(QuartetError, match="bad memory"):
        await gate.score(ScoreRequest((1, 2), ((1, 1),)))
    gate.set_out_of_service("")
    again = gate.generate(request)
    assert [event async for event in again] == list(range(100))


@pytest.mark.parametrize("dead", ["", "the adapter of run 'r' is dead"])
async def test_who_got_no_numbers_is_told_that_or_that_the_weights_are_dead(dead: str) -> None:
    """canary.py 1: by Generate and by Score."""

    class NoNumbers(Scripted):
        async def generate(self, request: Any) -> AsyncIterator[int]:
            yield 0
            raise NonFiniteLogits()

    async def verdict(run_id: str) -> str:
        return dead

    engine: Any = NoNumbers(NonFiniteLogits())
    gate = Gate(engine)
    gate.set_verdict(verdict)
    request: Any = ScoreRequest((1, 2), ((1, 1),))
    with pytest.raises(QuartetError, match=dead or None) as generated:
        _ = [event async for event in gate.generate(request)]
    with pytest.raises(QuartetError, match=dead or None) as scored:
        await gate.score(request)
    assert [isinstance(one.value, NonFiniteLogits) for one in (generated, scored)] == [not dead] * 2


def test_why_updates_are_not_taken_is_told_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten first; what is about no run in particular is about all of them."""
    monkeypatch.setattr(canary, "MAX_REFUSED", 2)
    engine: Any = Scripted()
    gate = Gate(engine)

    def told() -> list[str]:
        return [one.run_id for one in gate.info().update_refusals]

    for run_id in ("a", "b", "a", "c", "c"):
        gate.set_update_refused(refusal("does not fit", run_id))
    assert told() == ["a", "c"], "what is told anew takes no other's place"
    gate.set_update_taken("a")
    gate.set_away(QuartetError("RUN_UNKNOWN", "no such run", run_id="d"))
    assert told() == ["d", "c"]
    gate.set_away(QuartetError("NOT_READY", "gone", run_id="d"))
    assert told() == ["", "c"]
    gate.set_update_refused(refusal("versions are not announced", ""))
    gate.set_away(None)
    assert told() == ["c"], "something is announced again"
    gate.set_update_taken()
    assert told() == []
