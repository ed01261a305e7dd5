"""Raw text as samples to train on: without a chat template, as TRL trains on it.

1. A text ends with the tokenizer's end of text, unless it does so already, and begins with what the tokenizer
   puts before any text (a beginning of text, where it has one).
2. Of a prompt with a completion the completion is covered, to its end. The tokens are those of the two
   together where those of the prompt alone are their beginning. Where they are not, because letters on both
   sides of the boundary are one token, each is tokenized by itself: what stands before the completion is what
   the model is asked to go on from. (TRL leaves the end of the prompt out then.)
3. Of a text every token but the first is covered, which nothing predicts; of a prompt likewise, where prompts
   are learned, too. A text of more tokens than a piece may have is cut into pieces that begin with the last
   token of the one before: still every token is covered once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from quartet.cli.sft.line import Form, Passage
from quartet.cli.sft.special_tokens import SETTINGS, named_tokens
from quartet.config import ConfigError
from quartet.v1.rollout_pb2 import PolicySpan, Sample


class Passages:
    """Makes samples of raw text, for the model of a folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises ConfigError."""
        self._tokenizer, self._end = tokenizer, _end_of_text(folder)
        # As text they would be tokenized, too; which a tokenizer puts around any text it marks.
        around = tokenizer.encode("x", add_special_tokens=True)
        self._front: list[int] = []
        for token, is_special in zip(around.ids, around.special_tokens_mask, strict=True):
            if not is_special:
                break
            self._front.append(token)

    def samples(
        self, passage: Passage, most: int | None = None, *, learn_prompts: bool = False
    ) -> list[Sample]:
        """Of a completion one; of a text as many pieces of at most so many tokens as it takes; none where so
        few tokens leave nothing to predict. Raises ValueError."""
        if passage.form is Form.TEXT:
            ids = [*self._front, *self._ids(self._ended(passage.text))]
            return [_sample(piece, 1) for piece in _pieces(ids, most or len(ids))]
        sample = self._completion(passage, learn_prompts=learn_prompts)
        return [sample] if sample.spans[0].length else []

    def _completion(self, passage: Passage, *, learn_prompts: bool) -> Sample:
        completion = self._ended(passage.text)
        given, whole = self._ids(passage.prompt), self._ids(passage.prompt + completion)
        if whole[: len(given)] != given:
            apart = [*given, *self._ids(completion)]
            if self._text(apart) != self._text(whole):
                raise ValueError(
                    "prompt ends within a token, and the tokenizer reads completion otherwise by itself; end "
                    "prompt where a token ends, such as before a space"
                )
            whole = apart
        start = 0 if learn_prompts else len(self._front) + len(given)
        return _sample([*self._front, *whole], max(1, start))

    def _ended(self, text: str) -> str:
        return text if text.endswith(self._end) else text + self._end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _sample(ids: Sequence[int], start: int) -> Sample:
    return Sample(token_ids=ids, spans=[PolicySpan(start=start, length=len(ids) - start)])


def _pieces(ids: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    if most > 1:
        for start in range(0, len(ids) - 1, most - 1):
            yield ids[start : start + most]


def _end_of_text(folder: Path) -> str:
    if (found := named_tokens(folder).get("eos_token")) is None:
        raise ConfigError(
            f"{folder / SETTINGS} names no eos_token, with which a text that is learned has to end; add it, "
            "or write chats"
        )
    return found
