"""Requests to the policy, whichever door they come through: gRPC and the OpenAI front answer from here.

1. Nothing is decided here but whether a request is well-formed and which weights it waits for.
2. A request waits for its run and version within its deadline, and never longer than `version_wait_s`.
3. Long texts are rendered and parsed in a thread; short ones at once, which costs less than the way there.
4. A grammar is compiled, in a thread, before anything is queued: what cannot be enforced is refused here.
5. Given tokens are never rendered again (invariant 6). Where a template leaves no sound way to append to
   them, the whole conversation is rendered if it is remembered, else refused; the break is counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import prometheus_client
from quartet.errors import QuartetError, refused
from quartet.inference import MAX_COMPLETIONS, NO_EXTENSION, concerning
from quartet.kit import tracing
from quartet.seeds import requested_seeds
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.chat import Chat, Unextendable
from quartet_inference.chat.lengths import too_long
from quartet_inference.conversations import Conversations, Messages
from quartet_inference.ended_text import ended_text
from quartet_inference.engine import Delta, Engine, Finish, Reason, Request, Routed, ServedWeights, refusal
from quartet_inference.forms import form_of, unenforceable
from quartet_inference.messages import from_turn, to_template, tool_to_template
from quartet_inference.sampling import experts_from, resolve
from quartet_inference.structure.compiling import Compiler
from quartet_inference.structure.following import Compiled, StructureError
from quartet_inference.updates import ServedNews

#: What takes less than 0.2 ms to render or to parse; the hop to a thread and back costs that much.
INLINE_BYTES = 2048
INLINE_TOKENS = 512
#: Left of the deadline when waiting ends: the typed error arrives before the caller's clock ends the call.
DEADLINE_MARGIN_SECONDS = 0.25

PREFIX_BREAKS = prometheus_client.Counter(
    "quartet_prefix_breaks", "Requests whose prompt could not extend the caller's tokens."
)
_REASONS = {Reason.STOP: pb.FINISH_REASON_STOP, Reason.LENGTH: pb.FINISH_REASON_LENGTH}

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class _Prompt:
    token_ids: tuple[int, ...]
    tools: Tools
    rendered: bool = True
    kept: bool = True
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


@dataclass(frozen=True)
class Started:
    """What is completed, and with which tools."""

    prompt: tuple[int, ...]
    tools: Tools
    rendered: bool  # from messages, wholly or in part
    kept: bool  # it extends the tokens that were given


@dataclass(frozen=True)
class Ended:
    """The end of one completion."""

    index: int
    reason: pb.FinishReason
    stop_match: str
    text: str  # all of it, thinking and calls included
    message: common_pb2.Message
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    routed: Routed | None = None  # where it was asked for


class Answerer:
    """Answers to requests, from an engine and a chat template."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        news: ServedNews,
        version_wait_s: float,
        on_missing: Callable[[str], None] = lambda run_id: None,
    ) -> None:
        """`news` tells when the engine's weights change; `on_missing` is told of a run that is not served."""
        self._on_missing = on_missing
        self._engine = engine
        self._chat = chat
        self._news = news
        self._version_wait_s = version_wait_s
        self._conversations = Conversations()
        self._compiler = Compiler(chat.structures)
        self._lock = threading.Lock()
        self.prefix_breaks = 0
        # Of completions that ended: tokens of their prompts, and those of them that were not computed again.
        self.prompt_tokens = self.cached_tokens = 0

    async def answer(
        self, request: pb.GenerateRequest, remaining_s: float | None, top: int = 0
    ) -> AsyncIterator[Started | Delta | Ended]:
        """The start, deltas and ends of a request. Errors: those of Generate.

        `top` alternatives of each token come with the deltas: no message of the contract has them.
        """
        prompt, wanted = await self._prepared(request, remaining_s, room_for=1)
        wanted = replace(wanted, top=top) if top else wanted
        tracing.event("queued", prompt_tokens=len(prompt.token_ids), completions=wanted.n)
        sampled: list[list[int]] = [list(prompt.sampled) for _ in range(wanted.n)]
        routed: dict[int, Routed] = {}
        async with aclosing(self._engine.generate(wanted)) as events:  # type: ignore[type-var]
            begun: Started | None = Started(prompt.given, prompt.tools, prompt.rendered, prompt.kept)
            async for event in events:
                if begun is not None:
                    tracing.event("first_token")
                    yield begun  # with the first tokens: one message where two would say the same
                    begun = None
                if isinstance(event, Delta):
                    sampled[event.index].extend(event.token_ids)
                    yield event
                elif isinstance(event, Routed):
                    routed[event.index] = event
                else:
                    rest = (prompt, routed.get(event.index), wanted.sampling.min_tokens)
                    ending = (event, sampled[event.index], *rest)
                    short = len(sampled[event.index]) <= INLINE_TOKENS
                    yield self._end(*ending) if short else await asyncio.to_thread(self._end, *ending)

    async def prompt(self, request: pb.GenerateRequest, remaining_s: float | None) -> tuple[int, ...]:
        """What `answer` would complete, once the weights are there; it may fill the context.

        Errors: those of Generate.
        """
        prompt, wanted = await self._prepared(request, remaining_s, room_for=0)
        refused = refusal(wanted, self._engine.info().serving(wanted.run_id))
        if refused is not None:
            raise refused
        return prompt.given

    async def _prepared(
        self, request: pb.GenerateRequest, remaining_s: float | None, room_for: int
    ) -> tuple[_Prompt, Request]:
        if request.n > MAX_COMPLETIONS:
            raise refused("n", request.n, f"ask for at most {MAX_COMPLETIONS} completions")
        small = request.ByteSize() <= INLINE_BYTES
        prompt = self._formed(request) if small else await asyncio.to_thread(self._formed, request)
        compiled = await self._compiled(prompt) if prompt.grammar else None
        wanted = replace(self._request_of(request, prompt, room_for), compiled=compiled)
        await self._wait_for_weights(wanted, request.HasField("min_policy_version"), remaining_s)
        return prompt, wanted

    def held_up(self, request: pb.GenerateRequest, behind: str = "") -> str:
        """Why the weights that the request waits for cannot come for now; empty where they may, or did.
        `behind`: why the adapter of its run is not the newest."""
        info = self._engine.info()
        here = _suits(info.serving(request.run_id), request.run_id, request.min_policy_version)
        return "" if here else behind or concerning(info.update_refusals, request.run_id)

    def _formed(self, request: pb.GenerateRequest) -> _Prompt:
        """The prompt, and the grammar of what may follow it."""
        try:
            prompt = self._prompt_of(request)
            form = form_of(request)
            if form is None:
                return prompt
            grammar = self._chat.grammar(prompt.given, prompt.tools, form)
        except RecursionError:  # of the tools' schemas, in the template, or of the structure's
            raise refused("tools, structure or settings", "nested too deeply", "send flatter ones") from None
        return replace(prompt, grammar=grammar, formed_by=form.field)

    async def _compiled(self, prompt: _Prompt) -> Compiled:
        """The grammar of a prompt. Errors: INVALID_REQUEST, NOT_IMPLEMENTED, OVERLOADED."""
        try:
            compiled = await self._compiler.compiled(prompt.grammar)
        except StructureError as error:
            raise unenforceable(prompt.formed_by, error) from error
        if prompt.resumed:
            follower = await asyncio.to_thread(compiled.follower, prompt.sampled)
            if follower.stuck:
                raise refused("resumed_tokens", prompt.resumed, "send tokens that the structure allows")
        return compiled

    def _prompt_of(self, request: pb.GenerateRequest) -> _Prompt:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise refused("prompt", "absent", "send messages or tokens")
        settings, tools = request.template_settings, [tool_to_template(tool) for tool in request.tools]
        template = self._chat.template.given(settings)
        if kind == "tokens":
            return self._given(request, tools)
        if request.resumed_tokens:
            raise refused("resumed_tokens", request.resumed_tokens, "send tokens, not messages")
        if not request.messages.messages:
            raise refused("messages", "empty", "send at least one message")
        messages = tuple(to_template(message) for message in request.messages.messages)
        prompt = tuple(self._chat.render(messages, tools, self._room(), settings))
        return _Prompt(prompt, tools, settings=settings, messages=messages if template.may_break else None)

    def _given(self, request: pb.GenerateRequest, tools: Tools) -> _Prompt:
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
            return self._extended(token_ids, tail, tools, request.template_settings)
        return _Prompt(token_ids, tools, rendered=False, resumed=resumed)

    def _extended(
        self, token_ids: tuple[int, ...], tail: list[dict[str, Any]], tools: Tools, settings: str
    ) -> _Prompt:
        """Exact tokens with messages behind them."""
        may_break = self._chat.template.given(settings).may_break
        known = self._conversations.recall(token_ids, settings) if may_break else None
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
        return _Prompt(extended, tools, kept=kept, settings=settings, messages=messages)

    def _room(self) -> int:
        return self._engine.info().max_model_len

    def _count_break(self) -> None:
        with self._lock:
            self.prefix_breaks += 1
        PREFIX_BREAKS.inc()

    def _request_of(self, request: pb.GenerateRequest, prompt: _Prompt, room_for: int) -> Request:
        info = self._engine.info()
        if not prompt.token_ids:
            raise refused("messages", "rendered to nothing", "send a message with content")
        room = info.max_model_len - len(prompt.given)
        if room < max(room_for, prompt.resumed):
            raise too_long(f"{len(prompt.token_ids)}", len(prompt.token_ids), info.max_model_len)
        return Request(
            prompt=prompt.token_ids,
            sampling=resolve(request.sampling, room, info.vocab_size, prompt.grammar),
            n=max(1, request.n),
            seeds=tuple(requested_seeds(request)),
            run_id=request.run_id,
            min_version=request.min_policy_version,
            exact_version=request.exact_policy_version if request.HasField("exact_policy_version") else None,
            keep_prefix=bool(request.session_id),
            resumed=prompt.resumed,
            experts_from=experts_from(request, len(prompt.given), prompt.kept, info.routers),
        )

    async def _wait_for_weights(self, wanted: Request, has_minimum: bool, remaining_s: float | None) -> None:
        """Wait for the run and the version that a request names; the engine checks the rest."""

        def suits() -> bool:
            return _suits(self._engine.info().serving(wanted.run_id), wanted.run_id, wanted.min_version)

        served = self._engine.info().serving(wanted.run_id)
        if served is None and not wanted.run_id and not has_minimum:
            raise QuartetError("NOT_READY", "no verified weights are served yet")
        if wanted.run_id and not _suits(served, wanted.run_id, 0):
            self._on_missing(wanted.run_id)
        limit_s = self._version_wait_s
        if remaining_s is not None:
            limit_s = min(limit_s, max(0.0, remaining_s - DEADLINE_MARGIN_SECONDS))
        if suits() or await self._news.wait_for(lambda _: suits(), limit_s):
            return
        served = self._engine.info().serving(wanted.run_id)
        have = served.version if served is not None else "none"
        if not _suits(served, wanted.run_id, 0):
            have_run = served.run_id if served is not None else ""
            message = f"run {have_run or '(none)'} is served, run {wanted.run_id or '(any)'} was waited for"
            raise QuartetError("RUN_NOT_SERVED", message, have=have_run, want=wanted.run_id)
        raise QuartetError(
            "DEADLINE",
            f"version {wanted.min_version} did not arrive in time; version {have} is served",
            waited_for=f"policy version {wanted.min_version}",
            have=have,
        )

    def _end(
        self, event: Finish, sampled: list[int], prompt: _Prompt, routed: Routed | None, min_tokens: int
    ) -> Ended:
        reader, special = self._chat.reader(prompt.given, prompt.tools)
        text, stop_match = ended_text(self._chat, event, sampled, special, min_tokens)
        turn = reader.finish(text)
        message = from_turn(turn)
        if prompt.messages is not None:
            said = (*prompt.messages, to_template(message))
            self._conversations.keep([*prompt.given, *sampled], prompt.settings, said)
        calls = bool(turn.calls) and event.reason is Reason.STOP and not stop_match
        reason = pb.FINISH_REASON_TOOL_CALLS if calls else _REASONS[event.reason]
        used = (len(prompt.given), len(sampled), event.cached_tokens)
        with self._lock:  # short texts are parsed on the event loop, long ones in threads
            self.prompt_tokens += len(prompt.given)
            self.cached_tokens += event.cached_tokens
        return Ended(event.index, reason, stop_match, text, message, *used, routed)


def _suits(served: ServedWeights | None, run_id: str, minimum: int) -> bool:
    """Whether these answer a request that names a run, or none, and a version."""
    return served is not None and run_id in ("", served.run_id) and served.version >= minimum
