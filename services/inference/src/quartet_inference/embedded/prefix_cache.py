"""Keys and values of prompts already computed, for the next prompt that begins alike.

1. What is found for an owner was computed by that owner's weights: an owner is the serial of an adapter, or 0
   for the base model, whose every change calls `clear`.
2. It never holds more than its budget; what was used longest ago goes first.
3. `find` returns a true common prefix: tokens are compared, hashes only find the candidates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from quartet_inference.engine import Experts

#: Shared beginnings are found at multiples of this; a shorter one is not worth the copy.
BLOCK_TOKENS = 16


Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Prefix:
    """Computed tokens: keys and values of each, and the logits that follow the last where they are known.

    Where the engine notes them, the experts of each token, too.
    """

    tokens: tuple[int, ...]
    kv: Tensor
    logits: Tensor | None
    owner: int = 0
    experts: Experts | None = None

    @property
    def key(self) -> Key:
        """Where it is kept."""
        return self.owner, self.tokens

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        beside = sum(one.nbytes for one in (self.logits, self.experts) if one is not None)
        return self.kv.nbytes + beside + 32 * len(self.tokens)


class PrefixCache:
    """Prefixes by content."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._prefixes: OrderedDict[Key, Prefix] = OrderedDict()
        self._blocks: dict[int, Key] = {}  # hash of the first k blocks -> a prefix that begins so
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def clear(self) -> None:
        """Forget everything."""
        self._prefixes.clear()
        self._blocks.clear()
        self.nbytes = 0

    def forget(self, owner: int) -> None:
        """Forget what an owner has."""
        for key in [key for key in self._prefixes if key[0] == owner]:
            self._drop(key)

    def find(self, tokens: tuple[int, ...], owner: int = 0) -> tuple[Prefix | None, int]:
        """The best prefix and how many of its positions serve.

        All of them only where the logits come along.
        """
        exact = self._prefixes.get((owner, tokens))
        if exact is not None and exact.logits is not None:
            self._prefixes.move_to_end((owner, tokens))
            return exact, len(tokens)
        for block in reversed(list(_block_hashes(owner, tokens))):
            key = self._blocks.get(block)
            if key is None or key[0] != owner:
                continue
            shared = min(_common(key[1], tokens), len(tokens) - 1)
            if shared >= BLOCK_TOKENS:
                self._prefixes.move_to_end(key)
                return self._prefixes[key], shared
        return None, 0

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix, if it fits at all."""
        if prefix.nbytes > self._budget_bytes:
            return
        held = self._prefixes.get(prefix.key)
        if held is not None:
            if held.logits is not None or prefix.logits is None:
                self._prefixes.move_to_end(prefix.key)
                return
            self._drop(prefix.key)
        self._prefixes[prefix.key] = prefix
        self.nbytes += prefix.nbytes
        for block in _block_hashes(*prefix.key):
            self._blocks[block] = prefix.key
        while self.nbytes > self._budget_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, key: Key) -> None:
        prefix = self._prefixes.pop(key)
        self.nbytes -= prefix.nbytes
        for block in _block_hashes(*key):
            if self._blocks.get(block) == key:
                del self._blocks[block]


def _block_hashes(owner: int, tokens: Sequence[int]) -> Iterator[int]:
    value = owner
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        value = hash((value, tuple(tokens[end - BLOCK_TOKENS : end])))
        yield value


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many they begin with alike. By halves: Python compares whole slices much sooner than tokens."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
