"""What the rows of a batch may not sample next, as a tensor.

1. The masks of a step are computed on the CPU, several at a time where it has the cores, and brought to a
   device in one copy, a bit for each token.
2. Tokens that the model has logits for and the tokenizer no text are never allowed.
3. A row that is stuck is allowed nothing, and is told apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from quartet_inference.structure.following import Follower

#: Threads that compute masks; a step has few that take long.
EXECUTOR_THREADS = 8


@cache
def _executor() -> LLExecutor:
    """One for all batches of a process: its threads take longer to make than the masks."""
    return LLExecutor(min(EXECUTOR_THREADS, os.cpu_count() or 1))


class Following(Protocol):
    """A row that may follow a structure."""

    @property
    def follower(self) -> Follower | None:
        """Where it is, all of its tokens accepted."""
        ...


class Masks:
    """Those of a fixed list of rows, each of which has a follower."""

    def __init__(self, rows: Sequence[Following], device: torch.device | None) -> None:
        self._rows = rows
        self._device = device
        followers = [row.follower for row in rows]
        words = max(one.words for one in followers if one is not None)  # they are of one tokenizer
        pinned = device is not None and device.type == "cuda"
        self._packed = torch.zeros(len(rows), words, dtype=torch.int32, pin_memory=pinned)
        self._words = self._packed.numpy()
        self._executor = _executor() if len(rows) > 1 else None
        here = device is None or device.type == "cpu"
        self._bits = None if here else torch.arange(8, dtype=torch.uint8, device=device)

    def forbidden(self, vocabulary: int) -> tuple[Tensor, list[int]]:
        """Whether each row may not sample each token, and the rows that are stuck."""
        stuck = self._fill()
        bits = self._unpacked()[:, :vocabulary]
        missing = vocabulary - bits.shape[1]
        return (torch.nn.functional.pad(bits, (0, missing), value=True) if missing > 0 else bits), stuck

    def _fill(self) -> list[int]:
        """A bit for each token that is forbidden; the rows that are stuck."""
        followers = [row.follower for row in self._rows]
        matchers = [(one.matcher, index) for index, one in enumerate(followers) if one is not None]
        pointer, row_bytes = self._words.ctypes.data, self._words.strides[0]
        if self._executor is None:
            matchers[0][0].unsafe_compute_mask_ptr(pointer, row_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, pointer, row_bytes, len(matchers))
        stuck = [index for matcher, index in matchers if matcher.is_error()]
        self._words[stuck] = 0
        np.invert(self._words, out=self._words)
        return stuck

    def _unpacked(self) -> Tensor:
        """A truth value for each bit."""
        rows = len(self._rows)
        if self._bits is None:
            bits = np.unpackbits(self._words.view(np.uint8), axis=1, bitorder="little")
            return torch.from_numpy(bits).view(torch.bool)
        # Never waited for: the next step's masks need the tokens that this one is drawn for.
        there = self._packed.to(self._device, non_blocking=True).view(torch.uint8)
        return ((there[:, :, None] >> self._bits) & 1).view(torch.bool).view(rows, -1)
