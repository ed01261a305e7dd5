"""Tiles: every query once, with the keys that it may see, and few others."""

from __future__ import annotations

import random

import pytest
import torch
from quartet_trainer import tiles
from quartet_trainer.masks import row_mask
from quartet_trainer.packing import PADDING
from torch import Tensor


def seen(segments_RL: Tensor, scores: int) -> tuple[Tensor, int]:
    """[T, T] True where a query sees a key by the tiles, and how many scores they compute."""
    found = torch.zeros(segments_RL.numel() + 1, segments_RL.numel() + 1, dtype=torch.int)
    computed = 0
    for tile in tiles.tiles_of(segments_RL, scores):
        area = tile.hidden_NQK.numel()
        assert area <= scores or len(tile.queries_NQ) == 1
        assert tile.queries_NQ.shape[1] <= tiles.PIECE_QUERIES
        assert not tile.hidden_NQK[..., 0].any(), "a query that sees nothing has no softmax"
        computed += area
        for query_Q, key_K, hidden_QK in zip(tile.queries_NQ, tile.keys_NK, tile.hidden_NQK, strict=True):
            found[query_Q[:, None], key_K] += ~hidden_QK
    # What fills up: it may see, and is not seen.
    assert not found[:-1, -1].any()
    return found[:-1, :-1], computed


def wanted(segments_RL: Tensor) -> Tensor:
    mask = row_mask(segments_RL)[:, 0]
    mask[segments_RL == PADDING] = False
    return torch.block_diag(*mask.int())


@pytest.mark.parametrize("scores", [1 << 20, 300, 1])
def test_each_query_sees_once_what_the_mask_lets_it_see(scores: int) -> None:
    chance = random.Random(20261122)
    for _ in range(20):
        width = 40
        rows = []
        for _ in range(3):
            tails = [chance.randint(1, 12) for _ in range(chance.randint(1, 3))]
            lengths = [chance.choice([0, 5, 9]), *tails]
            row = [number for number, length in enumerate(lengths) for _ in range(length)][:width]
            rows.append(row + [PADDING] * (width - len(row)))
        segments_RL = torch.tensor(rows)
        found, _ = seen(segments_RL, scores)
        assert torch.equal(found, wanted(segments_RL)), rows


def test_a_long_row_that_many_share_costs_what_its_samples_cost() -> None:
    prompt, tail, members = 24, 64, 8
    segments_RL = torch.tensor([[0] * prompt + [n for n in range(1, members + 1) for _ in range(tail)]])
    found, computed = seen(segments_RL, 1 << 20)
    assert torch.equal(found, wanted(segments_RL))
    assert computed == prompt**2 + members * tail * (prompt + tail)


def test_the_keys_of_a_long_row_are_gathered_once_for_each_piece_however_small_the_bound() -> None:
    length = 50 * tiles.PIECE_QUERIES
    made = tiles.tiles_of(torch.zeros((1, length), dtype=torch.long), 1000)
    assert len(made) == 50
    assert sum(tile.keys_NK.numel() for tile in made) == tiles.PIECE_QUERIES * 50 * 51 / 2


def test_short_tails_take_their_long_prompt_together() -> None:
    prompt, members, rows = 496, 16, 3
    segments_RL = torch.tensor([[0] * prompt + list(range(1, members + 1))] * rows)
    found, _ = seen(segments_RL, 1 << 17)
    assert torch.equal(found, wanted(segments_RL))
    made = tiles.tiles_of(segments_RL, 1 << 17)
    assert sum(int((tile.query_places_NQ.amax(1) >= prompt).sum()) for tile in made) == rows
    assert all(tile.keys_NK.numel() <= (1 << 17) / tiles.PIECE_QUERIES for tile in made)


def test_micro_batches_of_padding_alone_have_no_tiles() -> None:
    assert tiles.tiles_of(torch.full((2, 3), PADDING), 100) == ()
