"""Which keys each query of a packed micro-batch is multiplied with, cut into tiles.

1. Every position that is no padding is a query once. It sees the positions before it in its segment and in
   the prompt that its row shares, and itself.
2. Other keys stand with a query only where they lie ahead in its piece, belong to short neighbours that share
   the piece, or fill the tile up: a prompt is taken once for each PIECE_QUERIES of what follows it.
3. A tile has at most `scores` scores and `scores` / PIECE_QUERIES keys, or is one piece.
4. Pure: equal segments give equal tiles.

Shapes: R rows, L columns; T = R * L positions, row after row. A tile has N pieces of Q queries and K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quartet_trainer.packing import PADDING, PROMPT

#: More queries in a piece waste more on keys that lie ahead of most of them; fewer make small products.
PIECE_QUERIES = 64
#: A piece joins a tile whose keys are at most so many times its own.
MOST_PADDING = 1.25
#: Layers of a forward and a backward pass ask for the same tiles again.
KEPT = 2

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """Pieces that are computed together, filled up to equal sizes. What fills up has the position T."""

    queries_NQ: Tensor
    keys_NK: Tensor
    # Segments, and places in the row; keys that fill up have a place that no query has.
    query_segments_NQ: Tensor
    key_segments_NK: Tensor
    query_places_NQ: Tensor
    key_places_NK: Tensor

    @property
    def hidden_NQK(self) -> Tensor:
        """True where a query does not see a key; it always sees the first one.

        Made anew for every layer: those of a long row together are its square.
        """
        segments_N1K = self.key_segments_NK[:, None, :]
        strange = (segments_N1K != self.query_segments_NQ[:, :, None]) & (segments_N1K != PROMPT)
        return strange | (self.key_places_NK[:, None, :] > self.query_places_NQ[:, :, None])


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring queries begin..end of a row, with the keys of its prompt and those from `first` on."""

    row: int  # where the row begins
    shared: int  # tokens of the prompt
    first: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        return self.shared + self.end - self.first


def tiles_of(segments_RL: Tensor, scores: int) -> tuple[Tile, ...]:
    """The tiles of segments as quartet_trainer.packing numbers them; `scores` counts pairs of positions."""
    segments = segments_RL.numpy()
    return _tiles(segments.shape[1], segments.tobytes(), scores, PIECE_QUERIES)


@lru_cache(maxsize=KEPT)
def _tiles(width: int, segments: bytes, scores: int, queries: int) -> tuple[Tile, ...]:
    numbers_RL = np.frombuffer(segments, np.int64).reshape(-1, width)
    pieces = [
        piece for row in range(len(numbers_RL)) for piece in _pieces(numbers_RL[row], row, queries, scores)
    ]
    pieces.sort(key=lambda piece: (piece.keys, piece.end - piece.begin))
    tiles, pending, longest = [], list[_Piece](), 0
    for piece in pieces:
        longest = max(longest, piece.end - piece.begin)
        if pending and (
            (len(pending) + 1) * max(longest, queries) * piece.keys > scores
            or piece.keys > MOST_PADDING * pending[0].keys
        ):
            tiles.append(_tile(pending, numbers_RL.reshape(-1), width))
            pending, longest = [], piece.end - piece.begin
        pending.append(piece)
    return (*tiles, _tile(pending, numbers_RL.reshape(-1), width)) if pending else ()


def _pieces(numbers_L: _Ints, row: int, queries: int, scores: int) -> list[_Piece]:
    at = row * len(numbers_L)
    edges = np.flatnonzero(np.diff(numbers_L, prepend=PADDING - 1, append=PADDING - 1)).tolist()
    prompt = edges[1] if numbers_L[0] == PROMPT else 0
    pieces: list[_Piece] = []
    for begin, end in pairwise(edges):
        if numbers_L[begin] == PADDING:
            continue
        shared = prompt if begin else 0
        last = pieces[-1] if begin > prompt > 0 else None
        if last is not None and last.begin == last.first:
            count = at + end - last.first
            if count <= queries and count * (shared + count) <= scores:
                pieces[-1] = replace(last, end=at + end)
                continue
        # However long it is: with fewer queries its keys would be gathered more often than they are used.
        for start in range(begin, end, queries):
            pieces.append(_Piece(at, shared, at + begin, at + start, at + min(end, start + queries)))
    return pieces


def _tile(pieces: Sequence[_Piece], segments_T: _Ints, width: int) -> Tile:
    def column(values: Sequence[int]) -> _Ints:
        return np.array(values, np.int64)[:, None]

    filling = len(segments_T)
    row, shared = column([one.row for one in pieces]), column([one.shared for one in pieces])
    first, keys = column([one.first for one in pieces]), column([one.keys for one in pieces])
    begin, count = column([one.begin for one in pieces]), column([one.end - one.begin for one in pieces])
    number_1K, number_1Q = np.arange(keys.max())[None], np.arange(count.max())[None]
    keys_NK = np.where(number_1K < shared, row + number_1K, first + number_1K - shared)
    keys_NK = np.where(number_1K < keys, keys_NK, filling)
    queries_NQ = np.where(number_1Q < count, begin + number_1Q, filling)
    # A query that fills up stands where its piece begins, and sees what is there.
    queries_seen_NQ, keys_seen_NK = (np.where(x < filling, x, begin) for x in (queries_NQ, keys_NK))
    return Tile(
        torch.from_numpy(queries_NQ),
        torch.from_numpy(keys_NK),
        torch.from_numpy(segments_T[queries_seen_NQ]),
        torch.from_numpy(segments_T[keys_seen_NK]),
        torch.from_numpy(queries_seen_NQ % width),
        torch.from_numpy(np.where(keys_NK < filling, keys_NK % width, width)),
    )
