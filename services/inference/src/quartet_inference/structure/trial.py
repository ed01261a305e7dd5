"""Compile a grammar in this process, which may die of it: run as a script, by `compiling`.

llguidance compiles by recursion, and takes minutes and gigabytes for some grammars of a few bytes. A thread
can neither survive the one nor be stopped in the other.

1. On stdin comes JSON: the grammar, the size of the vocabulary, its special tokens and end tokens. Those are
   all of a tokenizer that a grammar can name; bytes stand for the rest.
2. It takes at most CPU_SECONDS of a processor, MEMORY_BYTES for what it makes, and STACK_BYTES, half of what
   the service has for the same.
3. Exit code COMPILED: whoever compiles it again lives, stdout says how many bytes it took. REFUSED: stdout
   says why. TOO_MUCH, or a signal: it would take more; SIGKILL, that another process ended it. Anything else
   is a fault of this script.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from typing import Any

#: Of a schema of 100,000 characters a third of that is needed.
CPU_SECONDS = 1
#: Of one grammar, of which many are kept; a schema of 100,000 characters takes half of it.
MEMORY_BYTES = 64 << 20
#: Address space, which is several times as much.
SPACE_BYTES = 1 << 30
STACK_BYTES = 4 << 20
COMPILED, TOO_MUCH, REFUSED = 0, 3, 4
#: Below those who serve.
NICE = 5
#: States of a lexer: 1-2 KB each, and each completion has its own. The other bounds are llguidance's: 20 ms
#: for the lexer's beginning, 15 ms and 50,000 items of the parser for a step.
MAX_LEXER_STATES = 20_000
#: Of llguidance's reason, which may repeat a whole schema.
MAX_REASON_CHARS = 400

_LEAST = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})


class _Names:
    """A tokenizer with the special tokens of another one."""

    bos_token_id = None

    def __init__(self, size: int, special: dict[int, bytes], end_token: int) -> None:
        self.tokens = [special.get(token, b"") for token in range(size)]
        free = (token for token in range(size) if token not in special)
        self._of_byte = dict(zip(range(256), free, strict=False))
        for byte, token in self._of_byte.items():
            self.tokens[token] = bytes([byte])
        self.special_token_ids = sorted(special)
        self.eos_token_id = end_token

    def __call__(self, text: str) -> list[int]:
        return [self._of_byte[byte] for byte in text.encode()]


def main() -> int:
    """The exit code."""
    os.nice(NICE)
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, SPACE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, highest = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if highest == resource.RLIM_INFINITY else min(most, highest), highest))
    asked = json.loads(sys.stdin.buffer.read())
    codes: list[int] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: codes.append(_compiled(**asked)))
    thread.start()
    thread.join()
    return codes[0] if codes else 1


def _compiled(grammar: str, size: int, special: dict[str, str], ends: list[int]) -> int:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    named = {int(token): name.encode("latin-1") for token, name in special.items()}
    tokenizer = LLTokenizer(TokenizerWrapper(_Names(size, named, ends[0])), eos_token=ends)
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    LLMatcher(tokenizer, _LEAST, log_level=0, limits=limits).compute_bitmask()  # what the first one takes
    before = _used_bytes()
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except MemoryError:
        return TOO_MUCH
    if matcher.is_error():
        print(reason(matcher))
        return REFUSED
    grown_bytes = max(now - then for now, then in zip(_used_bytes(), before, strict=True))
    if grown_bytes > MEMORY_BYTES:
        return TOO_MUCH
    print(grown_bytes)
    return COMPILED


def _used_bytes() -> tuple[int, int]:
    """The memory of this process, at most so far and now: either may stand still where the other grows.

    Not getrusage's, which begins with what the service had when it started this process.
    """
    with open("/proc/self/status", "rb") as status:
        lines = dict(line.split(b":", 1) for line in status)
    most, now = (int(lines[name].split()[0]) * 1024 for name in (b"VmHWM", b"VmRSS"))
    return most, now


def reason(matcher: Any) -> str:
    """Why it is in error, in one line."""
    text = " ".join(str(matcher.get_error()).split("<state>")[0].split())
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "..."


if __name__ == "__main__":
    sys.exit(main())
