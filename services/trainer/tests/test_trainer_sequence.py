"""Order, at most once, kept results, and what happens to a call whose caller left."""

from __future__ import annotations

import asyncio

import pytest
from quartet.errors import QuartetError
from quartet_trainer.sequence import KEPT_RESULTS, Sequence


class Counter:
    """Work that counts how often it ran."""

    def __init__(self) -> None:
        self.ran = 0

    async def __call__(self) -> int:
        await asyncio.sleep(0)
        self.ran += 1
        return self.ran


async def test_calls_are_applied_in_order_and_once() -> None:
    """Invariant 2, sequence.py 1 and 2: applied at most once."""
    sequence, work = Sequence(), Counter()
    assert await sequence.apply(1, b"a", work) == 1
    assert await sequence.apply(2, b"b", work) == 2
    assert await sequence.apply(1, b"a", work) == 1
    assert (work.ran, sequence.applied) == (2, 2)


async def test_a_gap_is_refused() -> None:
    """sequence.py 1."""
    with pytest.raises(QuartetError) as raised:
        await Sequence(4).apply(6, b"a", Counter())
    assert raised.value.reason == "SEQUENCE_GAP"
    assert raised.value.metadata == {"have": "4", "want": "6"}


async def test_other_contents_under_a_used_number_are_refused() -> None:
    """sequence.py 2."""
    sequence = Sequence()
    await sequence.apply(1, b"a", Counter())
    with pytest.raises(
        QuartetError, match=r"SEQUENCE_CONFLICT: .* GetRun says which call was applied last"
    ) as raised:
        await sequence.apply(1, b"other", Counter())
    assert raised.value.metadata == {"held_digest": b"a".hex(), "wanted_digest": b"other".hex()}


async def test_results_are_kept_within_a_bound() -> None:
    """sequence.py 2."""
    sequence, work = Sequence(), Counter()
    for number in range(1, KEPT_RESULTS + 2):
        await sequence.apply(number, b"a", work)
    assert await sequence.apply(2, b"a", work) == 2
    with pytest.raises(QuartetError, match="no longer kept"):
        await sequence.apply(1, b"a", work)


async def test_a_concurrent_duplicate_waits_for_the_first() -> None:
    """sequence.py 2."""
    sequence, work = Sequence(), Counter()
    results = await asyncio.gather(*(sequence.apply(1, b"a", work) for _ in range(5)))
    assert (results, work.ran) == ([1] * 5, 1)


async def test_a_call_that_does_not_wait_for_the_one_before_it_is_told_so() -> None:
    sequence, may = Sequence(), asyncio.Event()
    first = asyncio.create_task(sequence.apply(1, b"a", may.wait))
    await asyncio.sleep(0)
    with pytest.raises(QuartetError, match="applied last, 1 is under way: send one call after the other"):
        await sequence.apply(2, b"b", Counter())
    may.set()
    await first
    assert await sequence.apply(2, b"b", Counter()) == 1


async def test_a_concurrent_call_with_other_contents_is_refused() -> None:
    sequence, work = Sequence(), Counter()
    results = await asyncio.gather(
        sequence.apply(1, b"a", work), sequence.apply(1, b"b", work), return_exceptions=True
    )
    assert results[0] == 1
    assert isinstance(results[1], QuartetError) and results[1].reason == "SEQUENCE_CONFLICT"


async def test_a_failed_call_leaves_its_number_free() -> None:
    """sequence.py 3."""
    sequence = Sequence()

    async def fails() -> int:
        raise QuartetError("INVALID_REQUEST", "no")

    with pytest.raises(QuartetError):
        await sequence.apply(1, b"a", fails)
    assert sequence.applied == 0
    assert await sequence.apply(1, b"b", Counter()) == 1


async def test_a_call_goes_on_when_its_caller_leaves() -> None:
    """sequence.py 4."""
    sequence, work, release = Sequence(), Counter(), asyncio.Event()

    async def slow() -> int:
        await release.wait()
        return await work()

    caller = asyncio.create_task(sequence.apply(1, b"a", slow))
    await asyncio.sleep(0.01)
    caller.cancel()
    release.set()
    await sequence.settle()
    assert (sequence.applied, work.ran) == (1, 1)
    assert await sequence.apply(1, b"a", slow) == 1


async def test_a_move_can_be_repeated_and_frees_the_numbers_after_it() -> None:
    sequence, work = Sequence(), Counter()
    for number in (1, 2, 3):
        await sequence.apply(number, b"a", work)

    async def load() -> int:
        return 1

    for _ in range(2):
        assert await sequence.apply(4, b"load", load, moves_to=lambda applied: applied) == 1
        assert sequence.applied == 1
    assert await sequence.apply(2, b"new", work) == 4
