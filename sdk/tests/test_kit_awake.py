"""The clock that leaves out when the process slept itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from quartet.kit import awake
from quartet.kit.awake import awake_s


async def test_promise_1_a_stretch_in_which_the_loop_did_not_run_counts_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads the clock first after it, and however often."""
    before, monotonic = awake_s(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 3600)
    assert awake_s() - before < 5
    await asyncio.sleep(0.01)
    assert awake_s() - before < 5


async def test_promise_1_while_the_loop_runs_it_is_the_loops_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody reads it for long."""
    monkeypatch.setattr(awake, "LOOK_SECONDS", 0.0)
    before, monotonic, passed = awake_s(), time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    await asyncio.sleep(1.1)  # the look that was due before
    for _ in range(1000):
        passed[0] += 0.5
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert awake_s() - before > 500


def test_promise_2_each_loop_has_its_own() -> None:
    async def read() -> float:
        return abs(awake_s() - asyncio.get_running_loop().time())

    assert asyncio.run(read()) < 1 and asyncio.run(read()) < 1
