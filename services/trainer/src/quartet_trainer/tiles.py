"""Which keys each query of a packed micro-batch is multiplied with, cut into tiles.

1. Every position that is no padding is a query once. Its keys are those before it in its segment and in the
   prompt that its row shares, and itself: keys that it must not see appear only where they fill a tile up.
2. A tile has at most `scores` scores, or those of one query.
3. Pure: equal segments give equal tiles.

Shapes: R rows, L columns; T = R * L positions, row after row. A tile has N pieces of Q queries and K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    # A query sees the keys whose number is at most its own; those that fill up are seen by none.
    query_numbers_NQ: Tensor
    key_numbers_NK: Tensor

    @property
    def hidden_NQK(self) -> Tensor:
        """True where a query does not see a key; it always sees the first one."""
        return self.key_numbers_NK[:, None, :] > self.query_numbers_NQ[:, :, None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring queries of one segment; columns count from the begin of all rows."""

    prompt: int  # column at which the prompt begins that the segment sees; its own begin, where it is one
    shared: int  # tokens of that prompt
    segment: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        return self.shared + self.end - self.segment


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
    tiles, pending = [], list[_Piece]()
    for piece in pieces:
        longest = max(one.end - one.begin for one in [*pending, piece])
        if pending and (
            (len(pending) + 1) * longest * piece.keys > scores or piece.keys > MOST_PADDING * pending[0].keys
        ):
            tiles.append(_tile(pending, numbers_RL.size))
            pending = []
        pending.append(piece)
    return (*tiles, _tile(pending, numbers_RL.size)) if pending else ()


def _pieces(numbers_L: _Ints, row: int, queries: int, scores: int) -> list[_Piece]:
    at = row * len(numbers_L)
    edges = np.flatnonzero(np.diff(numbers_L, prepend=PADDING - 1, append=PADDING - 1))
    shared = int(edges[1]) if numbers_L[0] == PROMPT else 0
    pieces = []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if numbers_L[begin] == PADDING:
            continue
        seen = shared if numbers_L[begin] != PROMPT else 0
        step = max(1, min(queries, scores // (seen + end - begin)))
        for first in range(begin, end, step):
            pieces.append(_Piece(at, seen, at + begin, at + first, at + min(end, first + step)))
    return pieces


def _tile(pieces: Sequence[_Piece], positions: int) -> Tile:
    def column(values: Sequence[int]) -> _Ints:
        return np.array(values, np.int64)[:, None]

    prompt, shared = column([one.prompt for one in pieces]), column([one.shared for one in pieces])
    segment, keys = column([one.segment for one in pieces]), column([one.keys for one in pieces])
    begin, count = column([one.begin for one in pieces]), column([one.end - one.begin for one in pieces])
    number_1K, number_1Q = np.arange(keys.max())[None], np.arange(count.max())[None]
    keys_NK = np.where(number_1K < shared, prompt + number_1K, segment + number_1K - shared)
    within_NK, within_NQ = number_1K < keys, number_1Q < count
    return Tile(
        torch.from_numpy(np.where(within_NQ, begin + number_1Q, positions)),
        torch.from_numpy(np.where(within_NK, keys_NK, positions)),
        torch.from_numpy(np.where(within_NQ, shared + begin - segment + number_1Q, 0)),
        torch.from_numpy(np.where(within_NK, number_1K, positions)),
    )
