"""Answers as OpenAI's API writes them: chat completions and completions, whole and in chunks.

Beyond that API, as vLLM has it: `reasoning_content`, `stop_reason`, and with `return_token_ids` the prompt's
and the choice's exact tokens; with those come `policy_versions`, the spans of tokens by the version that
sampled them. Where a prompt is told back with log-probabilities, `logprobs_policy_version` is the one version
that all of them are of.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from quartet_inference.answering import Ended
from quartet_inference.chat import Chat, FormatReader, Said
from quartet_inference.engine import Delta, Top
from quartet_inference.openai.bodies import ChatBody, CompletionBody
from quartet_inference.openai.choices import FINISH_REASONS, Choice, Speaker, tool_calls, versions_of
from quartet_inference.openai.echo import Echoed
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.stop_strings import Stops
from quartet_inference.text_stream import Detokenize, TextStream


class Reply:
    """What the answers to one request have in common."""

    object = ""
    chunk_object = ""
    prefix = ""
    #: After the last chunk of a stream.
    farewell = b"data: [DONE]\n\n"

    def __init__(self, chat: Chat, body: ChatBody | CompletionBody, fingerprint: str) -> None:
        self._chat = chat
        self._body = body
        self.echoed: dict[int, Echoed] = {}  # of each choice, where they are asked for
        self._frame = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The answer with all of its choices; `prompts` are those of every n of them."""
        ended = [choice.ended for choice in choices if choice.ended is not None]
        return {
            **self._frame,
            "object": self.object,
            "choices": [self._choice(index, choice, prompts) for index, choice in enumerate(choices)],
            "usage": self.usage(ended),
            **self._prompt_ids(prompts),
        }

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """A piece of a streamed answer."""
        chunk = {**self._frame, "object": self.chunk_object, "choices": choices}
        options = self._body.stream_options
        return {**chunk, "usage": usage} if options is not None and options.include_usage else chunk

    def usage(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """Tokens: a prompt counts once, whatever n is."""
        first = ended[:: self._body.n]
        prompt = sum(one.prompt_tokens for one in first)
        completion = sum(one.completion_tokens for one in ended)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in first)},
        }

    def speaker(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> Speaker:
        """Tells a choice while it grows."""
        raise NotImplementedError

    def rest(self, speaker: Speaker, ended: Ended) -> Said:
        """What was not told yet when the choice ended."""
        return speaker.rest(ended.message.reasoning_content, ended.message.content)

    def first_chunks(self, index: int, prompt: Sequence[int]) -> list[dict[str, Any]]:
        """What a choice begins with."""
        raise NotImplementedError

    def delta(self, index: int, said: Said, delta: Delta) -> list[dict[str, Any]]:
        """A piece of a choice; nothing where there is nothing to tell yet."""
        raise NotImplementedError

    def last_chunks(self, index: int, rest: Said, ended: Ended) -> list[dict[str, Any]]:
        """What a choice ends with."""
        raise NotImplementedError

    def end(self, ended: Sequence[Ended]) -> list[dict[str, Any]]:
        """What a stream ends with when all of its choices have ended."""
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        return [self.chunk([], self.usage(ended))] if usage else []

    def failure(self, error: OpenAiError) -> list[dict[str, Any]]:
        """What a stream ends with that failed."""
        return [error.body]

    def told(self, chunks: Sequence[dict[str, Any]]) -> bytes:
        """Chunks as server-sent events."""
        return b"".join(
            self.head(chunk) + b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks
        )

    def head(self, chunk: dict[str, Any]) -> bytes:
        """What stands above the data of an event."""
        return b""

    def _choice(self, index: int, choice: Choice, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        raise NotImplementedError

    def _prompt_ids(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {}

    def _ids(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        ids = [token for delta in deltas for token in delta.token_ids]
        return {"token_ids": ids, "policy_versions": versions_of(deltas)}

    def _name(self, token: int) -> str:
        """A token in a list of log-probabilities."""
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._chat.token_text(token)

    def _stops(self) -> Stops:
        stop = self._body.stop
        return Stops([stop] if isinstance(stop, str) else stop or (), self._body.min_tokens)

    @staticmethod
    def _end(ended: Ended) -> dict[str, Any]:
        return {"finish_reason": FINISH_REASONS[ended.reason], "stop_reason": ended.stop_match or None}


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl"
    _body: ChatBody

    def speaker(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> Speaker:
        """One that tells reasoning from content, and leaves out calls of `tools`."""
        reader, special = self._chat.reader(prompt, tools)
        return Speaker(lambda ids: self._chat.text(ids, keep=special), reader, self._stops())

    def first_chunks(self, index: int, prompt: Sequence[int]) -> list[dict[str, Any]]:
        """The role, and the prompt's tokens where they are asked for."""
        delta = {"role": "assistant", "content": ""}
        chunk = self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        return [{**chunk, **self._prompt_ids([prompt])}]

    def delta(self, index: int, said: Said, delta: Delta) -> list[dict[str, Any]]:
        """Reasoning and content; nothing where there is neither, nor log-probabilities or tokens to tell."""
        told = _told(said)
        logprobs = self._logprobs([delta])
        if not told and logprobs is None and not self._body.return_token_ids:
            return []
        piece = {"index": index, "delta": told, "logprobs": logprobs, "finish_reason": None}
        return [self.chunk([{**piece, **self._ids([delta])}])]

    def last_chunks(self, index: int, rest: Said, ended: Ended) -> list[dict[str, Any]]:
        """The text that is left, the calls of tools, and why it ended."""
        told: dict[str, Any] = _told(rest)
        calls = tool_calls(ended, indexed=True)
        if calls:
            told["tool_calls"] = calls
        return [self.chunk([{"index": index, "delta": told, "logprobs": None, **self._end(ended)}])]

    def _choice(self, index: int, choice: Choice, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        ended = choice.ended
        assert ended is not None
        calls = tool_calls(ended, indexed=False)
        message: dict[str, Any] = {"role": "assistant", "content": ended.message.content}
        if calls:
            message |= {"content": ended.message.content or None, "tool_calls": calls}
        if ended.message.reasoning_content:
            message["reasoning_content"] = ended.message.reasoning_content
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.deltas),
            **self._end(ended),
            **self._ids(choice.deltas),
        }

    def _prompt_ids(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompts[0])} if self._body.return_token_ids else {}

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*one) for one in top.items()]}
            for token, logprob, top in _sampled(deltas)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}


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
        self._shown: Detokenize = partial(chat.text, keep=chat.shown)
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
        given = zip(echoed.tokens[1:], echoed.scored.logprobs, strict=True)
        tops = zip(echoed.scored.tops, given, strict=True) if self._body.logprobs else ()
        logprobs = {
            "tokens": [self._name(token) for token in echoed.tokens],
            "token_logprobs": [None, *echoed.scored.logprobs],
            "top_logprobs": [None, *(self._named(*one) for one in tops)] if self._body.logprobs else None,
            "text_offset": self._text_offsets(index, echoed.tokens),
        }
        return {"logprobs": logprobs, "logprobs_policy_version": echoed.scored.version}

    def _named(self, top: Top, given: tuple[int, float]) -> dict[str, float]:
        """The likeliest tokens and the given one; of those of one text, as halves of characters, the best."""
        named: dict[str, float] = {}
        for token, logprob in (*top.items(), given):
            named.setdefault(self._name(token), logprob)
        return named

    def _text_offsets(self, index: int, tokens: Sequence[int]) -> list[int]:
        """Where in the choice's text each token begins."""
        stream = TextStream(lambda ids: self._chat.text(ids, special=True))
        offsets, text = [], ""
        for token in tokens:
            offsets.append(len(text))
            text += stream.feed([token])
        given = self._given[index // self._body.n]
        # What the tokenizer has put before a text is not told back.
        before = max(0, text.find(given)) if isinstance(given, str) else 0
        return [max(0, offset - before) for offset in offsets]

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        stream, at = self._texts.get(index) or (TextStream(self._shown), 0)
        tokens, values, tops, offsets = [], [], [], []
        for token, logprob, top in _sampled(deltas):
            tokens.append(self._name(token))
            values.append(logprob)
            if self._body.logprobs:
                tops.append(self._named(top, (token, logprob)))
            offsets.append(at)
            at += len(stream.feed([token]))
        self._texts[index] = (stream, at)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._body.logprobs else None,
            "text_offset": offsets,
        }


def _sampled(deltas: Sequence[Delta]) -> Iterator[tuple[int, float, Top]]:
    """Each token with its log-probability, and its alternatives where they are asked for."""
    for delta in deltas:
        tops = delta.tops or repeat(Top(), len(delta.token_ids))
        yield from zip(delta.token_ids, delta.logprobs, tops, strict=True)


def _told(said: Said) -> dict[str, Any]:
    told = {"reasoning_content": said.reasoning, "content": said.content}
    return {name: text for name, text in told.items() if text}
