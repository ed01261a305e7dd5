"""The columns of a micro-batch that one of several ranks computes (context.py).

1. All ranks have as many: what fills up the last ones is padding. Their parts are the micro-batch once, in
   the order of the ranks.
2. A covered token belongs to the rank whose columns predict it.

Shapes: R rows, W columns of a row, L of a part; N = R * W tokens. K covered tokens of the micro-batch, k
those of a part. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quartet_trainer.packing import PADDING, MicroBatch, Routes, Whole

_Array = npt.NDArray[Any]


def columns_of(batch: MicroBatch, place: int, size: int) -> MicroBatch:
    """The part of the rank at this place, of so many."""
    rows, width = batch.token_ids_RL.shape
    own = -(-width // size)
    begin, more = place * own, own * size - width
    # Of a token that a model embeds as zero the backward pass of a norm may be no number.
    tokens_RW = np.pad(batch.token_ids_RL, ((0, 0), (0, more)), mode="edge")
    positions_RW = np.pad(batch.position_ids_RL, ((0, 0), (0, more)))
    segments_RW = np.pad(batch.segments_RL, ((0, 0), (0, more)), constant_values=PADDING)
    row_K, column_K = np.divmod(batch.predictors_K, width)
    own_k = np.flatnonzero((begin <= column_K) & (column_K < begin + own))

    def mine(values_RW: _Array) -> _Array:
        return np.ascontiguousarray(values_RW[:, begin : begin + own])

    def tokens_of(values_N: _Array) -> _Array:
        values_RW = values_N.reshape(rows, width, *values_N.shape[1:])
        filled = np.pad(values_RW, [(0, 0), (0, more), *[(0, 0)] * (values_N.ndim - 1)])
        return mine(filled).reshape(rows * own, *values_N.shape[1:])

    routes = batch.routes
    return replace(
        batch,
        token_ids_RL=mine(tokens_RW),
        position_ids_RL=mine(positions_RW),
        segments_RL=mine(segments_RW),
        predictors_K=row_K[own_k] * own + column_K[own_k] - begin,
        targets_K=batch.targets_K[own_k],
        routes=routes and Routes(tokens_of(routes.experts_TNk), tokens_of(routes.told_T)),
        whole=Whole(segments_RW, positions_RW, own_k, len(batch.targets_K)),
    )
