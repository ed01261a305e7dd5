"""What the answers of all of OpenAI's ways to ask have in common, whole and in chunks.

Beyond that API, as vLLM has them: `reasoning_content` (there `reasoning` by now), `stop_reason`, and with
`return_token_ids` the prompt's and the choice's exact tokens; with those come `policy_versions`, the spans of
tokens by the version that sampled them.

1. What a choice is told as in chunks is what it is as a whole (choices.py).
2. Usage counts a prompt once, whatever n is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from quartet.kit.fresh import fresh_id

from quartet_inference.answering import Ended
from quartet_inference.chat import Chat, Said
from quartet_inference.engine import Delta, Top
from quartet_inference.openai.bodies import ChatBody, CompletionBody
from quartet_inference.openai.choices import FINISH_REASONS, Choice, Speaker, versions_of
from quartet_inference.openai.echo import Echoed
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.stop_strings import Stops


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
        options = body.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        self._tells_so_far = options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )
        self._frame = {
            "id": f"{self.prefix}-{fresh_id()}",
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
        return {**chunk, "usage": usage} if self._tells_usage else chunk

    def usage(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """Tokens: a prompt counts once, whatever n is."""
        first = ended[:: self._body.n]
        prompt = sum(one.prompt_tokens for one in first)
        completion = sum(one.completion_tokens for one in ended)
        return {
            **_counted(prompt, completion),
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in first)},
        }

    def so_far(self, chunks: list[dict[str, Any]], prompt: int, completion: int) -> list[dict[str, Any]]:
        """Pieces of one choice, with what it has used where each is to say so."""
        if not self._tells_so_far:
            return chunks
        return [{**chunk, "usage": _counted(prompt, completion)} for chunk in chunks]

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
        return [self.chunk([], self.usage(ended))] if self._tells_usage else []

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
        # A token by its id: its text may be a part of a character.
        stop = ended.stop_match or None if ended.stop_token is None else ended.stop_token
        return {"finish_reason": FINISH_REASONS[ended.reason], "stop_reason": stop}


def _counted(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def sampled_tokens(deltas: Sequence[Delta]) -> Iterator[tuple[int, float, Top]]:
    """Each token with its log-probability, and its alternatives where they are asked for."""
    for delta in deltas:
        tops = delta.tops or repeat(Top(), len(delta.token_ids))
        yield from zip(delta.token_ids, delta.logprobs, tops, strict=True)
