"""The short way to the tokens of a text: what transformers itself says, sooner, and beside other threads."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from quartet_inference.chat.tokenizer import SHORT_CHARS, encoder, load_tokenizer
from transformers import PreTrainedTokenizerFast

from .tokenizer_kinds import BOUNDED, UNBOUNDED, WORDS

KINDS = {**BOUNDED, **UNBOUNDED}


@pytest.mark.parametrize("kind", KINDS)
def test_short_and_long_texts_have_the_tokens_that_transformers_gives_them(kind: str) -> None:
    """tokenizer.py 2."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokenizer = KINDS[kind]()
    encode = encoder(tokenizer)
    for length in (0, 1, 5, 50, SHORT_CHARS):
        text = "".join(rng.choice(WORDS) for _ in range(length))
        for special in (False, True):
            assert encode(text, special) == tokenizer.encode(text, add_special_tokens=special)


def test_what_a_tokenizer_is_told_about_special_tokens_and_lengths_holds(tmp_path: Path) -> None:
    """A folder may have special tokens of a text read as text, and bring a truncation along that nobody
    asked for."""
    made = BOUNDED["gpt2"]()
    made.backend_tokenizer.enable_truncation(3)
    made.backend_tokenizer.enable_padding(length=9)
    made.save_pretrained(tmp_path)
    text = "the <|end|> the the"
    read = encoder(load_tokenizer(tmp_path))(text, False)
    assert made.convert_tokens_to_ids("<|end|>") in read and len(read) > 3
    split = PreTrainedTokenizerFast.from_pretrained(tmp_path, split_special_tokens=True)
    as_text = encoder(split)(text, False)
    assert made.convert_tokens_to_ids("<|end|>") not in as_text
    assert as_text == split.encode(text, add_special_tokens=False)


def test_a_tokenizer_that_encodes_in_its_own_way_is_asked_itself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *arguments: Any, **more: Any) -> Any:
            return super()._encode_plus(text.upper(), *arguments, **more)

    plain = BOUNDED["gpt2"]()
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert encoder(shouting)("quiet", False) == encoder(plain)("QUIET", False)


def test_other_threads_run_while_a_long_text_is_encoded(model_folder: Path) -> None:
    """tokenizer.py 3: the event loop is one of them."""
    encode = encoder(load_tokenizer(model_folder))
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.001):
            beats.append(time.monotonic())

    other = threading.Thread(target=beat)
    other.start()
    began = time.monotonic()
    encode("a " * (1 << 19), False)
    ended = time.monotonic()
    over.set()
    other.join()
    meanwhile = [at for at in beats if began < at < ended]
    longest_silence = max(b - a for a, b in zip([began, *meanwhile], [*meanwhile, ended], strict=True))
    assert longest_silence < (ended - began) / 2
