"""The embedded engine's keys and values: rows stay what they were while the tensor grows and closes holes."""

from __future__ import annotations

import random

import pytest
import torch
from quartet_inference.embedded import kv_cache
from quartet_inference.embedded.kv_cache import KvCache, KvShape

SHAPE = KvShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("wide_bytes", [0, 4096, kv_cache.WIDE_BYTES])
def test_rows_keep_their_positions_within_the_budget(
    wide_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 1 to 4 of the module: no holes, positions, growth within the budget, whatever its type."""
    monkeypatch.setattr(kv_cache, "WIDE_BYTES", wide_bytes)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    budget = SHAPE.bytes_per_token * 700
    cache = KvCache(SHAPE, max_rows=20, max_length=200, budget_bytes=budget)
    cache.hold_wide()
    rows: list[list[float]] = []  # what each row's positions hold
    grown = 0
    for step in range(2000):
        if rows and rng.random() < 0.1:
            hole = rng.randrange(len(rows))
            last = rows.pop()
            cache.fill_hole(hole, len(rows), len(last))
            if hole < len(rows):
                rows[hole] = last
        longest = max((len(row) for row in rows), default=0) + 1
        joins = rng.random() < 0.3 and cache.fits(len(rows) + 1, longest)
        if not joins and not (rows and cache.fits(len(rows), longest)):
            rows = rows[:1] if longest < 200 else []
            continue
        before = cache.data.numel()
        cache.reserve(len(rows) + joins, longest)
        grown += cache.data.numel() > before
        rows += [[]] if joins else []
        for index, row in enumerate(rows):
            cache.data[:, index, ..., len(row), :] = step + index / 64
            row.append(step + index / 64)
        assert cache.data.nbytes <= budget and bool(cache.data.isfinite().all())
        for index, row in enumerate(rows):
            held = cache.data[0, index, 0, 0, : len(row), 0].float()
            assert torch.equal(held, torch.tensor(row))
    assert grown > 3


def test_what_is_small_is_held_in_float64_and_leaves_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """kv_cache.py 4."""
    cache = KvCache(SHAPE, max_rows=20, max_length=200, budget_bytes=SHAPE.bytes_per_token * 4000)
    cache.reserve(2, 3)
    new = torch.randn(2 * 3, 2 * SHAPE.kv_heads * SHAPE.head_dim)
    positions = torch.arange(3).expand(2, -1)
    cache.write(1, cache.places(0, positions), new)
    before = [cache.read_row(row, 3) for row in range(2)]
    assert torch.equal(before[1][1].transpose(1, 2), new[3:].view(3, 2, -1, SHAPE.head_dim).transpose(0, 1))
    monkeypatch.setattr(kv_cache, "WIDE_BYTES", 2 * cache.data.nbytes)
    cache.hold_wide()
    assert cache.data.dtype == torch.float64
    cache.write(1, cache.places(0, positions), new)
    cache.copy_row(0, [2], 3)
    cache.write_row(3, before[1], 3)
    expected = [*before, before[0], before[1]]
    for rows in (4, 16):  # the second time it is too large
        cache.reserve(rows, 3)
        for row, entry in enumerate(expected):
            found = cache.read_row(row, 3)
            assert found.dtype == torch.float32 and torch.equal(found, entry), (rows, row)
    assert cache.data.dtype == torch.float32


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 10 tokens.*raise embedded\.kv_cache_bytes"):
        KvCache(SHAPE, 4, 11, SHAPE.bytes_per_token * 10)
