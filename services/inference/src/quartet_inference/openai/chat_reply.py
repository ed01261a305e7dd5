"""Answers of /v1/chat/completions, as OpenAI's API writes them: whole and in chunks.

1. Reasoning is told apart from content, and the calls of tools are no text.
2. Log-probabilities are those of every sampled token, with its alternatives where they are asked for. Each
   has the bytes of its token, which joined are the text where a token has half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet_inference.answering import Ended
from quartet_inference.chat import Said
from quartet_inference.engine import Delta
from quartet_inference.openai.bodies import ChatBody
from quartet_inference.openai.choices import Choice, Speaker, tool_calls
from quartet_inference.openai.reply import Reply, sampled_tokens


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
        content, told = [], self._body.alternatives
        for token, logprob, top in sampled_tokens(deltas):
            entry = self._entry(token, logprob)
            entry["top_logprobs"] = [self._entry(*one) for one in top.items()] if told else []
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        written = name.encode() if self._body.return_tokens_as_token_ids else self._chat.token_bytes(token)
        return {"token": name, "logprob": logprob, "bytes": list(written)}


def _told(said: Said) -> dict[str, Any]:
    told = {"reasoning_content": said.reasoning, "content": said.content}
    return {name: text for name, text in told.items() if text}
