"""Answers of /v1/completions, as OpenAI's API writes them: text as it was sampled, nothing parsed.

Where a prompt is told back with log-probabilities, `logprobs_policy_version` is the one version that all of
them are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from quartet_inference.answering import Ended
from quartet_inference.chat import Chat, FormatReader, Said
from quartet_inference.engine import Delta, Top
from quartet_inference.openai.bodies import CompletionBody
from quartet_inference.openai.choices import Choice, Speaker
from quartet_inference.openai.reply import Reply, sampled_tokens
from quartet_inference.text_stream import Detokenize, TextStream


class CompletionReply(Reply):
    """Of /v1/completions: text as it was sampled, nothing parsed."""

    object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl"
    _body: CompletionBody

    def __init__(self, chat: Chat, body: CompletionBody, fingerprint: str) -> None:
        super().__init__(chat, body, fingerprint)
        self._given = body.prompts()
        #: As of `Ended.text`: what is told while it grows has the same special tokens.
        self._shown: Detokenize = partial(chat.text, keep=chat.kept_tokens)
        #: Of each choice, the text of its tokens so far, and its length: there the next token begins.
        self._texts: dict[int, tuple[TextStream, int]] = {}

    def speaker(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> Speaker:
        """One that tells the text as it was sampled."""
        reader = FormatReader(None, False, None, {})
        return Speaker(self._shown, reader, self._stops())

    def rest(self, speaker: Speaker, ended: Ended) -> Said:
        """The text that was not told yet."""
        return speaker.rest("", ended.text)

    def first_chunks(self, index: int, prompt: Sequence[int]) -> list[dict[str, Any]]:
        """The prompt, its tokens where they are asked for, else nothing."""
        if not self._body.return_token_ids and not self._body.echo:
            return []
        piece = {"index": index, "text": self._echo(index, prompt), "logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": list(prompt)} if self._body.return_token_ids else {}
        return [self.chunk([{**piece, **ids}])]

    def delta(self, index: int, said: Said, delta: Delta) -> list[dict[str, Any]]:
        """Text; nothing where there is none, nor log-probabilities or tokens to tell."""
        logprobs = None if self._body.echo else self._logprobs(index, [delta])
        if not said.content and logprobs is None and not self._body.return_token_ids:
            return []
        piece = {"index": index, "text": said.content, "logprobs": logprobs, "finish_reason": None}
        return [self.chunk([{**piece, **self._ids([delta])}])]

    def last_chunks(self, index: int, rest: Said, ended: Ended) -> list[dict[str, Any]]:
        """The text that is left, why it ended, and of a prompt told back all log-probabilities."""
        piece = {"index": index, "text": rest.content, "logprobs": None, **self._end(ended)}
        return [self.chunk([{**piece, **self._scores(index)}])]

    def _choice(self, index: int, choice: Choice, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        assert choice.ended is not None
        ids = self._ids(choice.deltas)
        prompt = prompts[index // self._body.n]
        if ids:
            ids["prompt_token_ids"] = list(prompt)
        return {
            "index": index,
            "text": self._echo(index, prompt) + choice.ended.text,
            "logprobs": None if self._body.echo else self._logprobs(index, choice.deltas),
            **self._end(choice.ended),
            **ids,
            **self._scores(index),
        }

    def _echo(self, index: int, prompt: Sequence[int]) -> str:
        """The prompt where it is told back: as it was given, or the text of its tokens."""
        if not self._body.echo:
            return ""
        given = self._given[index // self._body.n]
        return given if isinstance(given, str) else self._chat.text(prompt, special=True)

    def _scores(self, index: int) -> dict[str, Any]:
        """The log-probabilities of a choice whose prompt is told back."""
        echoed = self.echoed.get(index)
        if echoed is None:
            return {}
        scored = echoed.scored
        # Nothing stands before the first token: it has no log-probability.
        tops: list[dict[str, float] | None] | None = None
        if self._body.logprobs:
            given = zip(echoed.tokens[1:], scored.logprobs, strict=True)
            tops = [None, *(self._named(top, one) for top, one in zip(scored.tops, given, strict=True))]
        logprobs = {
            "tokens": [self._name(token) for token in echoed.tokens],
            "token_logprobs": [None, *scored.logprobs],
            "top_logprobs": tops,
            "text_offset": self._text_offsets(index, echoed.tokens),
        }
        return {"logprobs": logprobs, "logprobs_policy_version": scored.version}

    def _named(self, top: Top, given: tuple[int, float]) -> dict[str, float]:
        """The likeliest tokens and the given one; of those of one text, as halves of characters, the best."""
        named: dict[str, float] = {}
        for token, logprob in (*top.items(), given):
            named.setdefault(self._name(token), logprob)
        return named

    def _text_offsets(self, index: int, tokens: Sequence[int]) -> list[int]:
        """Where in the choice's text each token begins."""
        stream = TextStream(lambda ids: self._chat.text(ids, special=True))
        texts = stream.feed_each(tokens, self._chat.token_text)
        *offsets, _ = accumulate(map(len, texts), initial=0)
        text = "".join(texts)
        given = self._given[index // self._body.n]
        # What the tokenizer has put before a text is not told back.
        before = max(0, text.find(given)) if isinstance(given, str) else 0
        return [max(0, offset - before) for offset in offsets]

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        stream, at = self._texts.get(index) or (TextStream(self._shown), 0)
        sampled = [token for delta in deltas for token in delta.token_ids]
        texts = stream.feed_each(sampled, partial(self._chat.token_text, special=False))
        *offsets, end = accumulate(map(len, texts), initial=at)
        self._texts[index] = (stream, end)
        tops = None
        if self._body.logprobs:
            tops = [self._named(top, (token, value)) for token, value, top in sampled_tokens(deltas)]
        return {
            "tokens": [self._name(token) for token in sampled],
            "token_logprobs": [value for delta in deltas for value in delta.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
