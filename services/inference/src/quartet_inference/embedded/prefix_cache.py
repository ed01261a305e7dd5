"""Keys and values of prompts already computed, for the next prompt that begins alike.

1. Everything in it comes from one state of the weights: `clear` is called at every change.
2. It never holds more than its budget; what was used longest ago goes first.
3. `find` returns a true common prefix: tokens are compared, hashes only find the candidates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

#: Shared beginnings are found at multiples of this; a shorter one is not worth the copy.
BLOCK_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Prefix:
    """Computed tokens: keys and values of each, and the logits that follow the last where they are known."""

    tokens: tuple[int, ...]
    kv: Tensor
    logits: Tensor | None

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return self.kv.nbytes + (0 if self.logits is None else self.logits.nbytes) + 32 * len(self.tokens)


class PrefixCache:
    """Prefixes by content."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._blocks: dict[int, tuple[int, ...]] = {}  # hash of the first k blocks -> a prefix that begins so
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def clear(self) -> None:
        """Forget everything."""
        self._prefixes.clear()
        self._blocks.clear()
        self.nbytes = 0

    def find(self, tokens: tuple[int, ...]) -> tuple[Prefix | None, int]:
        """The best prefix and how many of its positions serve.

        All of them only where the logits come along.
        """
        exact = self._prefixes.get(tokens)
        if exact is not None and exact.logits is not None:
            self._prefixes.move_to_end(tokens)
            return exact, len(tokens)
        for block in reversed(list(_block_hashes(tokens))):
            key = self._blocks.get(block)
            if key is None:
                continue
            shared = min(_common(key, tokens), len(tokens) - 1)
            if shared >= BLOCK_TOKENS:
                self._prefixes.move_to_end(key)
                return self._prefixes[key], shared
        return None, 0

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix, if it fits at all."""
        if prefix.nbytes > self._budget_bytes:
            return
        held = self._prefixes.get(prefix.tokens)
        if held is not None:
            if held.logits is not None or prefix.logits is None:
                self._prefixes.move_to_end(prefix.tokens)
                return
            self._drop(prefix.tokens)
        self._prefixes[prefix.tokens] = prefix
        self.nbytes += prefix.nbytes
        for block in _block_hashes(prefix.tokens):
            self._blocks[block] = prefix.tokens
        while self.nbytes > self._budget_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, key: tuple[int, ...]) -> None:
        prefix = self._prefixes.pop(key)
        self.nbytes -= prefix.nbytes
        for block in _block_hashes(key):
            if self._blocks.get(block) == key:
                del self._blocks[block]


def _block_hashes(tokens: Sequence[int]) -> Iterator[int]:
    value = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        value = hash((value, tuple(tokens[end - BLOCK_TOKENS : end])))
        yield value


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return min(len(a), len(b))
