"""Groups that failed in a row: as they were sent out, whenever they end."""

from __future__ import annotations

import random

import pytest
from orch_world import RUN
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import in_a_row
from quartet_orchestrator.in_a_row import InARow


def rows(outcomes: str) -> list[int]:
    """How long each run of failures is: F fails, x says nothing, G goes well, . is under way."""
    broken = outcomes.replace("x", "").replace("G", ".")
    return [len(row) for row in broken.split(".") if row]


@pytest.mark.parametrize("seed", range(40))
def test_rows_do_not_depend_on_the_order_in_which_groups_end(seed: int) -> None:
    """in_a_row.py 1 and 2."""
    chance = random.Random(seed)
    outcomes = "".join(chance.choices("FxG.", (6, 1, 1, 1), k=60))
    row = InARow()
    for group in range(60):
        row.sent(100 + group)
    longest, seen = 0, ["."] * 60
    for group in chance.sample(range(60), 60):
        seen[group] = outcome = outcomes[group]
        if outcome == "G":
            row.went_well(100 + group)
        elif outcome != ".":
            longest = max(longest, row.failed(100 + group, "why" if outcome == "F" else None))
        assert longest == max(rows("".join(seen)), default=0), (seed, "".join(seen))


def test_what_is_told_are_the_latest_until_one_goes_well() -> None:
    row = InARow()
    for group in range(5):
        row.sent(group)
    assert row.failed(0, "a") == 1 and row.failed(2, "b") == 1 and row.latest == (1, "b")
    assert row.failed(1, "c") == 3 and row.latest == (3, "c")
    assert row.failed(3, None) == 3 and row.latest == (3, "c")
    row.went_well(4)
    assert row.latest is None


def test_old_failures_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """in_a_row.py 3"""
    monkeypatch.setattr(in_a_row, "REMEMBERED", 8)
    row = InARow()
    for group in range(100):
        row.sent(group)
        assert row.failed(group, "why") == min(group + 1, 8)


async def test_quick_failures_stop_no_run_while_groups_between_them_are_sampled(world) -> None:
    """rollouts.py 7: of a batch in which every fifth task fails at once."""
    groups = 60
    world.host.failing_tasks, world.host.max_delay_s = set(range(0, 50, 5)), 0.5
    world.host.fails_at_once = True
    toml = world.toml(steps=1, evals=0).replace("batch_size = 8", f"batch_size = {groups * 4}")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    assert run.ledger.trained == groups * 4
    assert run.ledger.discarded["failed:ENVIRONMENT"] >= 10 * 4
