"""What a request is to complete: its tokens, and what is known of the conversation that they are of.

1. Given tokens are never rendered again (invariant 6). Where a template leaves no sound way to append to
   them, the whole conversation is rendered if it is remembered, else refused; the break is counted.
2. With the prompt comes the grammar of what may follow it, where the request has a form.
3. May be used from several threads: long texts are rendered in them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import prometheus_client
from quartet.errors import refused
from quartet.inference import NO_EXTENSION
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.chat import Chat, Unextendable
from quartet_inference.conversations import Conversations, Messages
from quartet_inference.engine import Engine
from quartet_inference.forms import form_of
from quartet_inference.messages import to_template, tool_to_template

PREFIX_BREAKS = prometheus_client.Counter(
    "quartet_prefix_breaks", "Requests whose prompt could not extend the caller's tokens."
)

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """What a completion answers, and what of the completion is there already."""

    token_ids: tuple[int, ...]
    tools: Tools
    rendered: bool = True  # from messages, wholly or in part
    kept: bool = True  # it extends the tokens that were given
    resumed: int = 0  # the last so many tokens were sampled by this completion
    settings: str = ""  # of the template, as the request has them
    messages: Messages | None = None  # the conversation, where it is known and a later turn may need it
    grammar: str = ""  # of the completion; empty: anything
    formed_by: str = ""  # the field that says it

    @property
    def given(self) -> tuple[int, ...]:
        """What the completion answers."""
        return self.token_ids[: len(self.token_ids) - self.resumed]

    @property
    def sampled(self) -> tuple[int, ...]:
        """What of the completion is there already."""
        return self.token_ids[len(self.token_ids) - self.resumed :]


class Prompts:
    """Prompts by a chat template, for an engine's context."""

    def __init__(self, engine: Engine, chat: Chat) -> None:
        self._engine = engine
        self._chat = chat
        self._conversations = Conversations()
        self._lock = threading.Lock()
        self.breaks = 0

    def of(self, request: pb.GenerateRequest) -> Prompt:
        """The prompt of a request, and the grammar of what may follow it. Errors: INVALID_REQUEST."""
        try:
            prompt = self._tokens_of(request)
            if request.sampling.stop:
                self._chat.check_texts("sampling.stop")
            form = form_of(request)
            if form is None:
                return prompt
            self._chat.check_texts(form.field)
            grammar = self._chat.grammar(prompt.given, prompt.tools, form)
        except RecursionError:  # of the tools' schemas, in the template, or of the structure's
            raise refused("tools, structure or settings", "nested too deeply", "send flatter ones") from None
        return replace(prompt, grammar=grammar, formed_by=form.field)

    def remember(self, prompt: Prompt, sampled: Sequence[int], message: common_pb2.Message) -> None:
        """That a prompt was answered, for a turn behind it that its template may not be able to append."""
        if prompt.messages is not None:
            conversation = (*prompt.messages, to_template(message))
            self._conversations.keep([*prompt.given, *sampled], prompt.settings, conversation)

    def _tokens_of(self, request: pb.GenerateRequest) -> Prompt:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise refused("prompt", "absent", "send messages or tokens")
        tools = [tool_to_template(tool) for tool in request.tools]
        # Of every request: settings that cannot be read are refused also where nothing is rendered.
        may_break = self._chat.template.given(request.template_settings).may_break
        if kind == "tokens":
            return self._given(request, tools, may_break)
        return self._rendered(request, tools, may_break)

    def _rendered(self, request: pb.GenerateRequest, tools: Tools, may_break: bool) -> Prompt:
        """A prompt of messages."""
        if request.resumed_tokens:
            raise refused("resumed_tokens", request.resumed_tokens, "send tokens, not messages")
        if not request.messages.messages:
            raise refused("messages", "empty", "send at least one message")
        messages = tuple(to_template(message) for message in request.messages.messages)
        settings = request.template_settings
        token_ids = tuple(self._chat.render(messages, tools, self._room(), settings))
        return Prompt(token_ids, tools, settings=settings, messages=messages if may_break else None)

    def _given(self, request: pb.GenerateRequest, tools: Tools, may_break: bool) -> Prompt:
        """A prompt of exact tokens."""
        token_ids, resumed = tuple(request.tokens.token_ids), request.resumed_tokens
        if not token_ids:
            raise refused("tokens.token_ids", "empty", "send at least one token, or messages")
        vocab_size = self._engine.info().vocab_size
        if max(token_ids) >= vocab_size:
            remedy = f"send tokens below the vocabulary's size, {vocab_size}"
            raise refused("tokens.token_ids", max(token_ids), remedy)
        tail = [to_template(message) for message in request.tokens.tail_messages]
        if resumed and request.n > 1:
            raise refused("resumed_tokens", resumed, "resume one completion, with n = 1")
        if resumed and tail:
            raise refused("resumed_tokens", resumed, "send no tail_messages: the prompt is complete")
        if resumed >= len(token_ids):
            raise refused("resumed_tokens", resumed, "leave at least one token of the prompt before them")
        if tail:
            settings = request.template_settings
            known = self._conversations.recall(token_ids, settings) if may_break else None
            return self._extended(token_ids, tail, tools, settings, known)
        return Prompt(token_ids, tools, rendered=False, resumed=resumed)

    def _extended(
        self,
        token_ids: tuple[int, ...],
        tail: list[dict[str, Any]],
        tools: Tools,
        settings: str,
        known: Messages | None,
    ) -> Prompt:
        """Exact tokens with messages behind them; `known` are those that became the tokens."""
        messages = (*known, *tail) if known is not None else None
        try:
            extended = tuple(self._chat.extend(token_ids, tail, tools, self._room(), settings))
        except Unextendable as why:
            if messages is None:
                self._count_break()
                remedy = "send the whole conversation as messages"
                raise refused(NO_EXTENSION, f"{len(tail)} messages", f"{remedy}: {why}") from why
            extended = tuple(self._chat.render(messages, tools, self._room(), settings))
        kept = extended[: len(token_ids)] == token_ids
        if not kept:
            self._count_break()
        return Prompt(extended, tools, kept=kept, settings=settings, messages=messages)

    def _room(self) -> int:
        return self._engine.info().max_model_len

    def _count_break(self) -> None:
        with self._lock:
            self.breaks += 1
        PREFIX_BREAKS.inc()
