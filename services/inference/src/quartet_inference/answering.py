"""Requests to the policy, whichever door they come through: gRPC and the OpenAI front answer from here.

1. Nothing is decided here but whether a request is well-formed and which weights it waits for.
2. A request waits for its run and version within its deadline, and never longer than `version_wait_s`. While
   other weights are served, a run that cannot come is refused at once, and one of which nobody has heard
   after UNKNOWN_SECONDS, for it may just be made. While none are, it is waited for. So it is where an adapter
   was loaded and its canary not scored yet; one whose canary died is refused at once, and looked for again.
3. Long texts are rendered and parsed in a thread; short ones at once, which costs less than the way there,
   but few in one round of the event loop (pace.py).
4. A grammar is compiled, in a thread, before anything is queued: what cannot be enforced is refused here.
5. Given tokens are never rendered again (invariant 6; prompts.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from quartet.errors import QuartetError, refused
from quartet.inference import MAX_COMPLETIONS, concerning
from quartet.kit import tracing
from quartet.seeds import requested_seeds
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.wanted import check_wanted

from quartet_inference.chat import Chat
from quartet_inference.chat.lengths import too_long
from quartet_inference.ended_text import ended_text
from quartet_inference.engine import Delta, Engine, Finish, Reason, Request, Routed, ServedWeights, refusal
from quartet_inference.forms import unenforceable
from quartet_inference.lookup import LOOK_SECONDS
from quartet_inference.messages import check_roles, from_turn
from quartet_inference.pace import Pace
from quartet_inference.prompts import Prompt, Prompts, Tools
from quartet_inference.sampling import experts_from, resolve
from quartet_inference.structure.compiling import Compiler
from quartet_inference.structure.following import Compiled, StructureError
from quartet_inference.updates import ServedNews

#: What takes less than 0.2 ms to render or to parse; the hop to a thread and back costs that much.
INLINE_BYTES = 2048
INLINE_TOKENS = 512
#: Left of the deadline when waiting ends: the typed error arrives before the caller's clock ends the call.
DEADLINE_MARGIN_SECONDS = 0.25
#: Whoever makes a run may send requests before it is there, but not for long. The publisher's answer counts
#: when it was asked after that, which is at most LOOK_SECONDS later.
UNKNOWN_SECONDS = 5.0
#: Of adapters, in a refusal.
MAX_NAMED = 8
#: What a request waits for while an operator holds decoding.
PAUSED = "Resume: decoding is paused (Pause)"

_REASONS = {Reason.STOP: pb.FINISH_REASON_STOP, Reason.LENGTH: pb.FINISH_REASON_LENGTH}


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
    stop_token: int | None = None  # the one whose text `stop_match` is


class Answerer:
    """Answers to requests, from an engine and a chat template."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        news: ServedNews,
        version_wait_s: float,
        on_missing: Callable[[str], None] = lambda run_id: None,
        in_vain: Callable[[str, float], str] = lambda run_id, since: "",
        follows: str = "",
        dead: Callable[[str], str] = lambda run_id: "",
    ) -> None:
        """`news` tells when the engine's weights change; `on_missing` is told of a run that is not served.

        `in_vain` says why such a run cannot come, or what was heard of it at a time of the loop or later;
        `follows` says which runs come, where that is not plain; `dead` why a run's adapter is not served.
        """
        self._on_missing, self._in_vain, self._follows, self._dead = on_missing, in_vain, follows, dead
        self._engine = engine
        self._chat = chat
        self._news = news
        self._version_wait_s = version_wait_s
        self._prompts = Prompts(engine, chat)
        self._compiler = Compiler(chat.structures)
        #: Of all that is done for requests before they are queued, at whichever door they come.
        self.pace = Pace()
        self._lock = threading.Lock()
        # Of completions that ended: tokens of their prompts, and those of them that were not computed again.
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def prefix_breaks(self) -> int:
        """Requests whose prompt could not extend the caller's tokens."""
        return self._prompts.breaks

    async def answer(
        self, request: pb.GenerateRequest, remaining_s: float | None, top: int = 0, watched: bool = False
    ) -> AsyncIterator[Started | Delta | Ended]:
        """The start, deltas and ends of a request. Errors: those of Generate.

        `top` alternatives of each token come with the deltas: no message of the contract has them. Where
        somebody has `watched` the answer grow, each token is a delta.
        """
        prompt, wanted = await self._prepared(request, remaining_s, room_for=1)
        wanted = replace(wanted, top=top, watched=watched)
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
                    tokens = sampled[event.index]
                    took = routed.get(event.index)
                    end = partial(self._end, event, tokens, prompt, took, wanted.sampling.min_tokens)
                    yield end() if len(tokens) <= INLINE_TOKENS else await asyncio.to_thread(end)

    async def prompt(self, request: pb.GenerateRequest, remaining_s: float | None) -> tuple[int, ...]:
        """What `answer` would complete, once the weights are there; it may fill the context.

        Errors: those of Generate.
        """
        prompt, wanted = await self._prepared(request, remaining_s, room_for=0)
        error = refusal(wanted, self._engine.info().serving(wanted.run_id))
        if error is not None:
            raise error
        return prompt.given

    def held_up(self, request: pb.GenerateRequest, behind: str = "") -> str:
        """Why the weights that the request waits for cannot come for now; empty where they may, or did.
        `behind`: why the adapter of its run is not the newest."""
        info = self._engine.info()
        here = _suits(info.serving(request.run_id), request.run_id, request.min_policy_version)
        return "" if here else behind or concerning(info.update_refusals, request.run_id)

    def waits_for(self, request: pb.GenerateRequest) -> str:
        """What the request waits for that is not here, for a person; empty where it waits for nothing."""
        info, run_id = self._engine.info(), request.run_id
        served = info.serving(run_id)
        if served is None or not _suits(served, run_id, 0):
            return f"run {run_id or '(any)'}, which is not served here; {self._served()}"
        if served.version < request.min_policy_version:
            of_run = f" of run {served.run_id}" if served.run_id else ""
            return f"version {request.min_policy_version}{of_run}; version {served.version} is served"
        return PAUSED if info.paused else ""

    async def _prepared(
        self, request: pb.GenerateRequest, remaining_s: float | None, room_for: int
    ) -> tuple[Prompt, Request]:
        await self.pace.turn()
        check_wanted(request)
        check_roles(request)
        if request.n > MAX_COMPLETIONS:
            raise refused("n", request.n, f"ask for at most {MAX_COMPLETIONS} completions")
        small = request.ByteSize() <= INLINE_BYTES
        prompt = self._prompts.of(request) if small else await asyncio.to_thread(self._prompts.of, request)
        compiled = await self._compiled(prompt) if prompt.grammar else None
        wanted = self._request_of(request, prompt, room_for, compiled)
        await self._wait_for_weights(wanted, request.HasField("min_policy_version"), remaining_s)
        return prompt, wanted

    async def _compiled(self, prompt: Prompt) -> Compiled:
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

    def _request_of(
        self, request: pb.GenerateRequest, prompt: Prompt, room_for: int, compiled: Compiled | None
    ) -> Request:
        info = self._engine.info()
        if not prompt.token_ids:
            raise refused("messages", "rendered to nothing", "send a message with content")
        room = info.max_model_len - len(prompt.given)
        if room < max(room_for, prompt.resumed):
            raise too_long(f"{len(prompt.token_ids)}", len(prompt.token_ids), info.max_model_len)
        untold = self._chat.untold(prompt.tools) if request.sampling.stop else frozenset[int]()
        return Request(
            prompt=prompt.token_ids,
            sampling=resolve(request.sampling, room, info.vocab_size, prompt.grammar, untold),
            n=max(1, request.n),
            seeds=tuple(requested_seeds(request)),
            run_id=request.run_id,
            min_version=request.min_policy_version,
            exact_version=request.exact_policy_version if request.HasField("exact_policy_version") else None,
            keep_prefix=bool(request.session_id),
            resumed=prompt.resumed,
            experts_from=experts_from(request, len(prompt.given), prompt.kept, info.routers),
            compiled=compiled,
        )

    async def _wait_for_weights(self, wanted: Request, has_minimum: bool, remaining_s: float | None) -> None:
        """Wait for the run and the version that a request names; the engine checks the rest."""
        served = self._engine.info().serving(wanted.run_id)
        if _suits(served, wanted.run_id, wanted.min_version):
            return
        clock = asyncio.get_running_loop().time
        began = clock()

        def suits() -> bool:
            return _suits(self._engine.info().serving(wanted.run_id), wanted.run_id, wanted.min_version)

        def missing() -> bool:
            served = self._engine.info().serving(wanted.run_id)
            return bool(wanted.run_id) and not _suits(served, wanted.run_id, 0)

        def dead() -> str:
            return self._dead(wanted.run_id) if missing() else ""

        def in_vain() -> str:
            if self._engine.info().served is None or not missing():
                return ""
            return self._in_vain(wanted.run_id, began + UNKNOWN_SECONDS)

        if served is None and not wanted.run_id and not has_minimum:
            raise QuartetError("NOT_READY", "no verified weights are served yet")
        limit_s = self._version_wait_s
        if remaining_s is not None:
            limit_s = min(limit_s, max(0.0, remaining_s - DEADLINE_MARGIN_SECONDS))
        while not suits():
            if why := in_vain():
                raise self._not_served(wanted.run_id, why)
            if missing():
                self._on_missing(wanted.run_id)
            if why := dead():
                raise QuartetError("NOT_READY", why)
            left_s = began + limit_s - clock()
            if left_s <= 0:
                raise self._too_late(wanted)
            again_s = LOOK_SECONDS if missing() else left_s
            await self._news.wait_for(lambda _: suits() or bool(in_vain() or dead()), min(left_s, again_s))

    def _too_late(self, wanted: Request) -> QuartetError:
        """The error of a request that has waited for as long as it may."""
        served = self._engine.info().serving(wanted.run_id)
        if served is None or not _suits(served, wanted.run_id, 0):
            return self._not_served(wanted.run_id, "it did not come in time")
        return QuartetError(
            "DEADLINE",
            f"version {wanted.min_version} did not arrive in time; version {served.version} is served",
            waited_for=f"policy version {wanted.min_version}",
            have=served.version,
        )

    def _not_served(self, run_id: str, why: str) -> QuartetError:
        """The error of a run that is none of those here."""
        served = self._engine.info().served
        have = "" if served is None else served.run_id
        message = f"run {run_id or '(any)'} is not served: {why}; {self._served()}"
        return QuartetError("RUN_NOT_SERVED", message, have=have, want=run_id)

    def _served(self) -> str:
        """What answers requests here."""
        info = self._engine.info()
        have = "" if info.served is None else info.served.run_id
        runs = [f"run {have}" if have else "the base model"] if info.served is not None else []
        runs += [f"the adapter of run {one.run_id}" for one in info.adapters[:MAX_NAMED]]
        more = f" and {len(info.adapters) - MAX_NAMED} more" if len(info.adapters) > MAX_NAMED else ""
        follows = f"; {self._follows}" if self._follows else ""
        return f"what is served: {', '.join(runs) or 'nothing'}{more}{follows}"

    def _end(
        self, event: Finish, sampled: list[int], prompt: Prompt, routed: Routed | None, min_tokens: int
    ) -> Ended:
        reader, special = self._chat.reader(prompt.given, prompt.tools)
        text, stop_match = ended_text(self._chat, event, sampled, special, min_tokens)
        turn = reader.finish(text)
        message = from_turn(turn)
        self._prompts.remember(prompt, sampled, message)
        calls = bool(turn.calls) and event.reason is Reason.STOP and not stop_match
        reason = pb.FINISH_REASON_TOOL_CALLS if calls else _REASONS[event.reason]
        with self._lock:  # short texts are parsed on the event loop, long ones in threads
            self.prompt_tokens += len(prompt.given)
            self.cached_tokens += event.cached_tokens
        return Ended(
            event.index,
            reason,
            stop_match,
            text,
            message,
            prompt_tokens=len(prompt.given),
            completion_tokens=len(sampled),
            cached_tokens=event.cached_tokens,
            routed=routed,
            stop_token=event.stop_token,
        )


def _suits(served: ServedWeights | None, run_id: str, minimum: int) -> bool:
    """Whether these answer a request that names a run, or none, and a version."""
    return served is not None and run_id in ("", served.run_id) and served.version >= minimum
