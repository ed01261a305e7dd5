"""Compiled grammars, and how far a completion has come in one.

1. A grammar is compiled once for all completions that have it, and each of them follows its own copy: what
   one samples changes no other. Those that were used last are kept, as many as weigh MAX_COMPILED_BYTES.
2. Which tokens are allowed depends on the grammar and the tokens so far alone.
3. A step's work and a follower's memory are bounded by LIMITS: a follower that meets them is stuck, allows
   nothing, and stays so. Compiling is bounded by nothing here: `compiling` first tries what nobody knows.
4. An end token is allowed where the grammar is complete, and nowhere else: a follower of what ended before is
   stuck.
5. A follower of what is compiled takes microseconds. Compiling takes milliseconds, and seconds at worst.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from quartet.errors import QuartetError
from quartet.inference import STUCK

from quartet_inference.structure.trial import MAX_LEXER_STATES, reason

#: Of a process. A thousand schemas of tools, or the four heaviest that a trial lets pass.
MAX_COMPILED_BYTES = 256 << 20
#: What one weighs at least, and for each character of its source: measured, 34 KiB are the smallest, and
#: 150 KiB and 34 bytes are those of plain schemas.
LEAST_BYTES = 192 << 10
CHARACTER_BYTES = 48
#: What one weighs that no trial has measured, as in the workers of an engine: 64 of these are kept.
UNKNOWN_BYTES = MAX_COMPILED_BYTES // 64
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
        self._ended = False

    def accept(self, token: int) -> None:
        """A token was sampled. Behind an end token there is nothing to follow."""
        if not self._ended:
            self._ended = token in self._end_tokens
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
    weight_bytes: int  # estimated

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
        #: What is kept weighs.
        self.kept_bytes = 0
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

    def compile(self, grammar: str, grown_bytes: int = UNKNOWN_BYTES) -> Compiled:
        """Have it ready; a trial of it grew by so much. Raises StructureError.

        Errors: NOT_IMPLEMENTED, by the tokenizer.
        """
        made = self._made(grammar, grown_bytes)
        if made.matcher.is_error():
            raise StructureError(reason(made.matcher))
        return made

    def follower(self, grammar: str, tokens: Iterable[int] = ()) -> Follower:
        """A follower of a grammar that another process has compiled; stuck where this one cannot.

        Errors: NOT_IMPLEMENTED, by the tokenizer.
        """
        return self._made(grammar, UNKNOWN_BYTES).follower(tokens)

    def _made(self, grammar: str, grown_bytes: int) -> Compiled:
        with self._compiling:
            known = self.find(grammar)
            if known is not None:
                return known
            tokenizer = self._ready()
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            first = matcher.deep_copy()
            if not matcher.is_error():
                first.compute_bitmask()
            weight = max(grown_bytes, LEAST_BYTES + CHARACTER_BYTES * len(grammar))
            broken = first.is_error()
            made = Compiled(first if broken else matcher, self._end_tokens, tokenizer.vocab_size, weight)
            if not broken:
                self._keep(grammar, made)
            return made

    def _keep(self, grammar: str, made: Compiled) -> None:
        with self._table:
            self._compiled[grammar] = made
            self.kept_bytes += made.weight_bytes
            while self.kept_bytes > MAX_COMPILED_BYTES:
                _, oldest = self._compiled.popitem(last=False)
                self.kept_bytes -= oldest.weight_bytes


def stuck() -> QuartetError:
    """The error of a completion that cannot go on."""
    return QuartetError(
        "INVALID_REQUEST",
        "structure: no token can go on with it, or it has become too complex to follow in a step",
        field=STUCK,
        value="",
        remedy="send a simpler one",
    )
