"""Keys and values of the running rows, in one tensor that stays compact.

1. Rows 0..n-1 are the running sequences; there are no holes (`fill_hole` moves the last row into one).
2. Position p of a row holds token p of its sequence. What lies behind a row's length is finite garbage that
   every mask excludes.
3. The tensor grows geometrically in rows and in length and never takes more than the budget; `fits` says so
   beforehand. While it grows, the old and the new one exist together for the time of the copy.
4. Where `hold_wide` was asked for, what is small is held in float64, which changes no value: attention that
   computes in float64 (attention.py) then widens nothing. What leaves the cache has the type of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# First capacity: a small group of short prompts. Everything beyond is reached by doubling.
FIRST_ROWS = 8
FIRST_LENGTH = 64
#: Of float64. Twice the bytes are read in each step; of more they no longer come from a processor's caches.
WIDE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class KvShape:
    """What one position of one row costs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """The slots. Layout [layers, rows, 2, kv_heads, length, head_dim], keys before values.

    What a decode step multiplies with one head, it reads in one stretch.
    """

    def __init__(self, shape: KvShape, max_rows: int, max_length: int, budget_bytes: int) -> None:
        self.shape = shape
        self.max_rows = max_rows
        self.max_length = max_length
        self.budget_tokens = budget_bytes // shape.bytes_per_token
        if self.budget_tokens < max_length:
            raise ValueError(
                f"the KV budget of {budget_bytes} bytes holds {self.budget_tokens} tokens, "
                f"less than one sequence of max_model_len {max_length}; "
                "raise embedded.kv_cache_bytes or lower max_model_len"
            )
        self.rows = 0
        self.length = 0
        self.place = 0  # another number, another tensor
        self._may_be_wide = False
        self.data = self._allocate(0, 0)
        self.reserve(1, 1)

    def _allocate(self, rows: int, length: int) -> Tensor:
        # Zeros and not empty: a masked value is multiplied by zero, and zero times NaN is NaN.
        size = (self.shape.layers, rows, 2, self.shape.kv_heads, length, self.shape.head_dim)
        widened = self.shape.bytes_per_token * rows * length * 8 // self.shape.dtype.itemsize
        budget = self.budget_tokens * self.shape.bytes_per_token
        wide = self._may_be_wide and widened <= min(WIDE_BYTES, budget)
        dtype = torch.float64 if wide else self.shape.dtype
        return torch.zeros(size, dtype=dtype, device=self.shape.device)

    def hold_wide(self) -> None:
        """From now on hold in float64 what is small."""
        self._may_be_wide = True
        self._become(self.rows, self.length)

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of up to `length` positions can be held together."""
        return rows <= self.max_rows and length <= self.max_length and rows * length <= self.budget_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room; the caller has asked `fits`."""
        if rows <= self.rows and length <= self.length:
            return
        assert self.fits(rows, length), (rows, length)
        new_rows = self._grown(self.rows, rows, FIRST_ROWS, self.max_rows)
        new_length = self._grown(self.length, length, FIRST_LENGTH, self.max_length)
        if not self.fits(
            new_rows, new_length
        ):  # near the budget: as long as the rows of now allow, up to double
            new_rows = rows
            new_length = max(length, min(2 * length, self.max_length, self.budget_tokens // rows))
        self._become(new_rows, new_length)

    def _become(self, rows: int, length: int) -> None:
        data = self._allocate(rows, length)
        rows_kept, length_kept = min(self.rows, rows), min(self.length, length)
        data[:, :rows_kept, ..., :length_kept, :] = self.data[:, :rows_kept, ..., :length_kept, :]
        self.data, self.rows, self.length = data, rows, length
        self.place += 1

    @staticmethod
    def _grown(have: int, need: int, first: int, limit: int) -> int:
        if need <= have:
            return have
        return min(limit, max(first, 2 * have, need))

    def places(self, first_row: int, positions_BT: Tensor) -> Tensor:
        """Where `write` puts these positions of neighbouring rows: [B * T * 2 * K]."""
        heads = 2 * self.shape.kv_heads
        first, end = first_row * heads, (first_row + len(positions_BT)) * heads
        starts = torch.arange(first, end, device=positions_BT.device) * self.length
        return (positions_BT[:, :, None] + starts.view(-1, 1, heads)).reshape(-1)

    def write(self, layer: int, places: Tensor, new: Tensor) -> Tensor:
        """Put keys and values side by side, [B * T, 2 * K * D], into a layer; what it holds then."""
        held = self.data[layer]
        dim = self.shape.head_dim
        held.view(-1, dim).index_copy_(0, places, new.to(held.dtype).reshape(-1, dim))
        return held

    def fill_hole(self, hole: int, last: int, length: int) -> None:
        """Move row `last` into row `hole`."""
        if hole != last:
            self.data[:, hole, ..., :length, :] = self.data[:, last, ..., :length, :]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Give every target row the first `length` positions of the source row."""
        first, end = targets[0], targets[-1] + 1
        assert targets == list(range(first, end)), "targets are neighbours"
        self.data[:, first:end, ..., :length, :] = self.data[:, source : source + 1, ..., :length, :]

    def read_row(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions of a row."""
        return self.data[:, row, ..., :length, :].to(self.shape.dtype, copy=True)

    def write_row(self, row: int, entry: Tensor, length: int) -> None:
        """Put the first `length` positions of a copied row into a row."""
        self.data[:, row, ..., :length, :] = entry[..., :length, :]

    def clean_row(self, row: int) -> None:
        """Zero a row that a faulty forward may have filled with NaN."""
        self.data[:, row] = 0
