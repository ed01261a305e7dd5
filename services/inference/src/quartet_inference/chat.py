"""Text on both sides of the tokens: the chat template before, messages and tool calls after.

1. `extend` never renders or encodes the given tokens again: its result begins with them, exactly.
2. `parse` reads Hermes and Qwen3 tool calls, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; a call
   that cannot be read stays in the text.
3. Thinking is split off only where the template itself knows `</think>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from quartet.config import ConfigError
from quartet.errors import QuartetError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

#: Stands for the sampled turn in a rendering whose only purpose is the text that follows such a turn.
SAMPLED_TURN = "QUARTETSAMPLEDTURN"
THINK_END = "</think>"
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it."""

    name: str
    arguments_json: str


@dataclass(frozen=True)
class Turn:
    """A sampled assistant turn."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


class Chat:
    """The tokenizer of a model folder and its template."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer."""
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model = {str(folder)!r} has no tokenizer that can be loaded: {error}"
            ) from error
        self.end_tokens = self._find_end_tokens(folder)
        self._separates_thinking = THINK_END in str(self._tokenizer.chat_template or "")

    def _find_end_tokens(self, folder: Path) -> frozenset[int]:
        ends: set[int] = set()
        if (folder / "generation_config.json").is_file():
            eos = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
            ends.update([eos] if isinstance(eos, int) else eos or [])
        if self._tokenizer.eos_token_id is not None:
            ends.add(int(self._tokenizer.eos_token_id))
        return frozenset(ends)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, opened for the assistant. Errors: INVALID_REQUEST."""
        return self._encode(self._template(messages, tools))

    def extend(
        self, token_ids: Sequence[int], tail: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """The given tokens, the close of the turn that they end with, the tail, the next turn's opening."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": SAMPLED_TURN}]
        text = self._template([*before, *tail], tools)
        _, found, after = text.partition(SAMPLED_TURN)
        if not found:
            raise _invalid(
                "tail_messages", "the chat template renders no assistant turn", "send messages instead"
            )
        closing = self._encode(after)
        if closing and token_ids[-1] in self.end_tokens and closing[0] == token_ids[-1]:
            closing = closing[1:]  # the turn was closed by the token that was sampled
        return [*token_ids, *closing]

    def _template(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise _invalid(
                "messages", f"the chat template refuses them: {error}", "send what the template knows"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, token_ids: Sequence[int], special: bool = False) -> str:
        """The text of tokens, special ones left out unless asked for."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )

    def parse(self, text: str, with_tools: bool) -> Turn:
        """Split a sampled text into thinking, content and tool calls."""
        reasoning = ""
        if self._separates_thinking and THINK_END in text:
            reasoning, _, text = text.partition(THINK_END)
            reasoning = reasoning.removeprefix("<think>").strip("\n")
            text = text.lstrip("\n")
        if not with_tools:
            return Turn(text, reasoning, ())
        calls: list[ParsedCall] = []

        def take(match: re.Match[str]) -> str:
            call = _read_call(match.group(1))
            if call is None:
                return match.group(0)
            calls.append(call)
            return ""

        content = TOOL_CALL.sub(take, text)
        return Turn(content.strip() if calls else content, reasoning, tuple(calls))


def _read_call(text: str) -> ParsedCall | None:
    """The call in a JSON object, its arguments as they are written; None where it is not one."""
    decoder = json.JSONDecoder()
    members: dict[str, tuple[Any, str]] = {}
    try:
        json.loads(text)
        at = _skip(text, 1)
        while text[at] != "}":
            key, at = decoder.raw_decode(text, at)
            start = _skip(text, _skip(text, at) + 1)
            value, at = decoder.raw_decode(text, start)
            members[key] = (value, text[start:at])
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    arguments, written = members.get("arguments", ({}, "{}"))
    if isinstance(arguments, str):  # some models quote the object
        written = arguments
    elif not isinstance(arguments, dict):
        return None
    return ParsedCall(name, written) if isinstance(name, str) and name else None


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _invalid(field: str, message: str, remedy: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST", f"{field}: {message}; {remedy}", field=field, value="", remedy=remedy
    )
