"""The answer to one request of /v1/responses, as the front's writers ask for it.

With `return_token_ids` the response has `prompt_token_ids`, `token_ids` and `policy_versions`, as a choice of
chat has them. Log-probabilities are of every sampled token, as chat's, and stand with the message's text:
an answer without a message has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet_inference.answering import Ended
from quartet_inference.chat import Chat, Said
from quartet_inference.engine import Delta
from quartet_inference.openai.bodies import ChatBody
from quartet_inference.openai.chat_reply import ChatReply
from quartet_inference.openai.choices import Choice
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.openai.responses.body import CARRIED, ResponsesBody, sent_as
from quartet_inference.openai.responses.events import Narrator
from quartet_inference.openai.responses.output import Item, closed, framed, output_of


class ResponsesReply(ChatReply):
    """Of /v1/responses. The one choice that chat would have is the response."""

    farewell = b""

    def __init__(self, asked: ResponsesBody, chat: Chat, body: ChatBody, fingerprint: str) -> None:
        super().__init__(chat, body, fingerprint)
        self._carry = CARRIED in asked.include
        self._frame = framed(asked, body, fingerprint)
        self._narrator = Narrator(self._frame, self._carry)
        self._prompt: Sequence[int] = ()
        self._streamed = Choice()

    def whole(self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The response."""
        ((choice,), (prompt,)) = choices, prompts
        assert choice.ended is not None
        frame = {**self._frame, **self._more(prompt, choice.deltas)}
        output = output_of(choice.ended, self._values(choice.deltas), self._carry)
        return closed(frame, output, choice.ended, self._used(choice.ended))

    def head(self, chunk: dict[str, Any]) -> bytes:
        """Events have names."""
        return f"event: {chunk['type']}\n".encode()

    def first_chunks(self, index: int, prompt: Sequence[int]) -> list[dict[str, Any]]:
        """The response, of which nothing is said yet."""
        self._prompt = prompt
        return list(self._narrator.begin())

    def delta(self, index: int, said: Said, delta: Delta) -> list[dict[str, Any]]:
        """What can be told of thinking and message."""
        self._streamed.deltas.append(delta)
        return list(self._narrator.say(said, self._values([delta])))

    def last_chunks(self, index: int, rest: Said, ended: Ended) -> list[dict[str, Any]]:
        """The text that is left, the calls of tools, and the whole response."""
        deltas = self._streamed.deltas
        values = self._values(deltas)
        return list(
            self._narrator.end(rest, ended, values, self._used(ended), self._more(self._prompt, deltas))
        )

    def failure(self, error: OpenAiError) -> list[dict[str, Any]]:
        """What a stream that failed ends with."""
        return list(self._narrator.fail(error.renamed(sent_as)))

    def _values(self, deltas: Sequence[Delta]) -> list[Item]:
        """Log-probabilities, where they are asked for."""
        logprobs = self._logprobs(deltas)
        return [] if logprobs is None else logprobs["content"]

    def _more(self, prompt: Sequence[int], deltas: Sequence[Delta]) -> Item:
        """The exact tokens, where they are asked for."""
        return {**self._prompt_ids([prompt]), **self._ids(deltas)}

    def _used(self, ended: Ended) -> Item:
        """Tokens. Those of the thinking are counted in its text, encoded once more."""
        thinking = len(self._chat.encode(ended.message.reasoning_content))
        return {
            "input_tokens": ended.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ended.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": ended.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thinking, ended.completion_tokens)},
            "total_tokens": ended.prompt_tokens + ended.completion_tokens,
        }
