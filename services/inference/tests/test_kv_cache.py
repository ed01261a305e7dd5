"""The embedded engine's keys and values: rows stay what they were while the tensor grows and closes holes."""

from __future__ import annotations

import random

import pytest
import torch
from quartet_inference.embedded.kv_cache import KvCache, KvShape

SHAPE = KvShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def test_rows_keep_their_positions_within_the_budget() -> None:
    """Invariants 1 to 3 of the module: no holes, positions, growth within the budget."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    budget = SHAPE.bytes_per_token * 700
    cache = KvCache(SHAPE, max_rows=20, max_length=200, budget_bytes=budget)
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
            cache.data[:, index, len(row)] = step + index / 64
            row.append(step + index / 64)
        assert cache.data.nbytes <= budget and bool(cache.data.isfinite().all())
        for index, row in enumerate(rows):
            assert torch.equal(cache.data[0, index, : len(row), 0, 0, 0], torch.tensor(row))
    assert grown > 3


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 10 tokens.*raise embedded\.kv_cache_bytes"):
        KvCache(SHAPE, 4, 11, SHAPE.bytes_per_token * 10)
