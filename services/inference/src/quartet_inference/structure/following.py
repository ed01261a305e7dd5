"""Compiled grammars, and how far a completion has come in one.

1. A grammar is compiled once for all completions that have it (the newest MAX_COMPILED are kept), and each of
   them follows its own copy: what one samples changes no other.
2. Which tokens are allowed depends on the grammar and the tokens so far alone.
3. A step's work and a follower's memory are bounded by LIMITS: a follower that meets them is stuck, allows
   nothing, and stays so. Compiling is bounded by nothing here: `compiling` first tries what nobody knows.
4. A follower of what is compiled takes microseconds. Compiling takes milliseconds, and seconds at worst.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from quartet.errors import QuartetError

from quartet_inference.structure.trial import MAX_LEXER_STATES, reason

#: Of a fleet's schemas few are in use at a time; a compiled one takes from 10 KiB to megabytes.
MAX_COMPILED = 64
LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class StructureError(Exception):
    """A grammar that cannot be enforced, and why."""


class Follower:
    """A completion on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, end_tokens: frozenset[int], vocabulary: int) -> None:
        """`matcher` is its own, at the beginning; the vocabulary is the tokenizer's."""
        self.matcher = matcher
        self.words = -(-vocabulary // 32)  # of a mask
        self._end_tokens = end_tokens

    def accept(self, token: int) -> None:
        """A token was sampled. Behind an end token there is nothing to follow."""
        if token not in self._end_tokens:
            self.matcher.consume_token(token)

    @property
    def stuck(self) -> bool:
        """Whether nothing can follow: what was accepted is not allowed, or a limit is reached."""
        return bool(self.matcher.is_error())


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar for a model's tokens."""

    matcher: LLMatcher  # at the beginning, never moved
    end_tokens: frozenset[int]
    vocabulary: int

    def follower(self, tokens: Iterable[int] = ()) -> Follower:
        """A follower, behind tokens that were sampled before; stuck where the grammar does not allow them."""
        follower = Follower(self.matcher.deep_copy(), self.end_tokens, self.vocabulary)
        for token in tokens:
            follower.accept(token)
        return follower


class Structures:
    """The grammars of one model."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], end_tokens: Iterable[int]) -> None:
        """The tokenizer is made when it is first needed: a model that is asked for no structure has none."""
        self._make_tokenizer = make_tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._named: dict[str, Any] | None = None
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._table = threading.Lock()
        self._compiling = threading.Lock()

    def named(self) -> dict[str, Any]:
        """What a grammar can name of the tokens, for `trial`. Errors: NOT_IMPLEMENTED, by the tokenizer."""
        with self._compiling:
            tokenizer = self._ready()
            if self._named is None:
                special = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
                names = {str(token): tokenizer.decode_bytes([token]).decode("latin-1") for token in special}
                self._named = {
                    "size": tokenizer.vocab_size,
                    "special": {token: name for token, name in names.items() if name},
                    "ends": sorted(self._end_tokens),
                }
            return self._named

    def _ready(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def find(self, grammar: str) -> Compiled | None:
        """What is compiled of it."""
        with self._table:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
            return known

    def compile(self, grammar: str) -> Compiled:
        """Have it ready. Raises StructureError. Errors: NOT_IMPLEMENTED, by the tokenizer."""
        made = self._made(grammar)
        if made.matcher.is_error():
            raise StructureError(reason(made.matcher))
        return made

    def follower(self, grammar: str, tokens: Iterable[int] = ()) -> Follower:
        """A follower of a grammar that another process has compiled; stuck where this one cannot.

        Errors: NOT_IMPLEMENTED, by the tokenizer.
        """
        return self._made(grammar).follower(tokens)

    def _made(self, grammar: str) -> Compiled:
        with self._compiling:
            known = self.find(grammar)
            if known is not None:
                return known
            tokenizer = self._ready()
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            first = matcher.deep_copy()
            if not matcher.is_error():
                first.compute_bitmask()
            if first.is_error():
                return Compiled(first, self._end_tokens, tokenizer.vocab_size)
            made = Compiled(matcher, self._end_tokens, tokenizer.vocab_size)
            with self._table:
                self._compiled[grammar] = made
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            return made


def stuck() -> QuartetError:
    """The error of a completion that cannot go on."""
    return QuartetError(
        "INVALID_REQUEST",
        "structure: no token can go on with it, or it has become too complex to follow in a step",
        field="structure",
        value="",
        remedy="send a simpler one",
    )
