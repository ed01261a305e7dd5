"""InferenceService over an Engine: requests in, frames out.

1. Nothing is decided here but whether a request is well-formed and which weights it waits for.
2. A request waits for its run and version within its deadline, and never longer than `version_wait_seconds`.
3. Rendering and parsing happen in a thread: the event loop never tokenizes.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from quartet.errors import QuartetError, unimplemented
from quartet.kit.stream import with_heartbeats
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc

from quartet_inference.chat import Chat
from quartet_inference.engine import Delta, Engine, Finish, Reason, Request, ServedWeights
from quartet_inference.sampling import refused, resolve
from quartet_inference.scoring import resolve_samples
from quartet_inference.updates import ServedNews

#: GenerateRequest.n says so.
MAX_COMPLETIONS = 256
#: Left of the deadline when waiting ends: the typed error arrives before the caller's clock ends the call.
DEADLINE_MARGIN_SECONDS = 0.25


@dataclass(frozen=True)
class _Prompt:
    token_ids: tuple[int, ...]
    rendered: bool


class InferenceServicer(rpc.InferenceServiceServicer):
    """Generate, Score, Pause, Resume, GetModel."""

    def __init__(
        self, engine: Engine, chat: Chat, news: ServedNews, base_model: str, version_wait_s: float
    ) -> None:
        """Serve an engine; `news` tells when its weights change."""
        self._engine = engine
        self._chat = chat
        self._news = news
        self._base_model = base_model
        self._version_wait_s = version_wait_s

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Sample completions."""
        beat = pb.GenerateResponse(heartbeat=common_pb2.Heartbeat(in_flight=max(1, request.n)))
        answer = self._answer(request, context.time_remaining())
        async with aclosing(with_heartbeats(answer, lambda: beat)) as frames:  # type: ignore[type-var]
            async for frame in frames:
                yield frame

    async def _answer(
        self, request: pb.GenerateRequest, remaining_s: float | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        if request.n > MAX_COMPLETIONS:
            raise refused("n", request.n, f"ask for at most {MAX_COMPLETIONS} completions")
        prompt = await asyncio.to_thread(self._tokens_of, request)
        wanted = self._request_of(request, prompt)
        await self._wait_for_weights(wanted, request.HasField("min_policy_version"), remaining_s)
        sampled: list[list[int]] = [[] for _ in range(wanted.n)]
        async with aclosing(self._engine.generate(wanted)) as events:  # type: ignore[type-var]
            ids = prompt.token_ids if prompt.rendered else ()
            # Given tokens are never rendered again.
            yield pb.GenerateResponse(start=pb.GenerateStart(prompt_token_ids=ids, prefix_kept=True))
            async for event in events:
                if isinstance(event, Delta):
                    sampled[event.index].extend(event.token_ids)
                    yield pb.GenerateResponse(delta=_delta(event))
                else:
                    finish = await asyncio.to_thread(
                        self._finish, event, sampled[event.index], prompt, bool(request.tools)
                    )
                    yield pb.GenerateResponse(finish=finish)

    def _tokens_of(self, request: pb.GenerateRequest) -> _Prompt:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise refused("prompt", "absent", "send messages or tokens")
        tools = [_tool(tool) for tool in request.tools]
        if kind == "messages":
            if not request.messages.messages:
                raise refused("messages", "empty", "send at least one message")
            messages = [_message(message) for message in request.messages.messages]
            return _Prompt(tuple(self._chat.render(messages, tools)), rendered=True)
        token_ids, tail = request.tokens.token_ids, request.tokens.tail_messages
        if not token_ids:
            raise refused("tokens.token_ids", "empty", "send at least one token, or messages")
        vocab_size = self._engine.info().vocab_size
        if max(token_ids) >= vocab_size:
            remedy = f"send tokens below the vocabulary's size, {vocab_size}"
            raise refused("tokens.token_ids", max(token_ids), remedy)
        if not tail:
            return _Prompt(tuple(token_ids), rendered=False)
        extended = self._chat.extend(token_ids, [_message(message) for message in tail], tools)
        return _Prompt(tuple(extended), rendered=True)

    def _request_of(self, request: pb.GenerateRequest, prompt: _Prompt) -> Request:
        info = self._engine.info()
        if not prompt.token_ids:
            raise refused("messages", "rendered to nothing", "send a message with content")
        room = info.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise QuartetError(
                "PROMPT_TOO_LONG",
                f"the prompt has {len(prompt.token_ids)} tokens, "
                f"at most {info.max_model_len - 1} leave room for one",
                tokens=len(prompt.token_ids),
                limit=info.max_model_len - 1,
            )
        return Request(
            prompt=prompt.token_ids,
            sampling=resolve(request.sampling, room, info.vocab_size),
            n=max(1, request.n),
            run_id=request.run_id,
            min_version=request.min_policy_version,
            exact_version=request.exact_policy_version if request.HasField("exact_policy_version") else None,
            keep_prefix=bool(request.session_id),
        )

    async def _wait_for_weights(self, wanted: Request, has_minimum: bool, remaining_s: float | None) -> None:
        """Wait for the run and the version that a request names; the engine checks the rest."""

        def right_run(served: ServedWeights | None) -> bool:
            return served is not None and wanted.run_id in ("", served.run_id)

        def suits(served: ServedWeights | None) -> bool:
            return right_run(served) and served is not None and served.version >= wanted.min_version

        served = self._engine.info().served
        if served is None and not wanted.run_id and not has_minimum:
            raise QuartetError("NOT_READY", "no verified weights are served yet")
        limit_s = self._version_wait_s
        if remaining_s is not None:
            limit_s = min(limit_s, max(0.0, remaining_s - DEADLINE_MARGIN_SECONDS))
        if suits(served) or await self._news.wait_for(suits, limit_s):
            return
        served = self._engine.info().served
        have = served.version if served is not None else "none"
        if not right_run(served):
            have_run = served.run_id if served is not None else ""
            message = f"run {have_run or '(none)'} is served, run {wanted.run_id or '(any)'} was waited for"
            raise QuartetError("RUN_NOT_SERVED", message, have=have_run, want=wanted.run_id)
        raise QuartetError(
            "DEADLINE",
            f"version {wanted.min_version} did not arrive in time; version {have} is served",
            waited_for=f"policy version {wanted.min_version}",
            have=have,
        )

    def _finish(
        self, event: Finish, sampled: list[int], prompt: _Prompt, with_tools: bool
    ) -> pb.GenerateFinish:
        text_ids = sampled
        stop_match = event.stop_string
        if event.stop_token is not None:
            stop_match = self._chat.text([event.stop_token], special=True)
            text_ids = sampled[:-1]
        elif event.reason is Reason.STOP and not event.stop_string:
            text_ids = sampled[:-1]  # the end token
        text = self._chat.text(text_ids)
        if event.stop_string:
            text = text[: text.find(event.stop_string)]
        turn = self._chat.parse(text, with_tools)
        reason = {Reason.STOP: pb.FINISH_REASON_STOP, Reason.LENGTH: pb.FINISH_REASON_LENGTH}[event.reason]
        if turn.calls and event.reason is Reason.STOP and not stop_match:
            reason = pb.FINISH_REASON_TOOL_CALLS
        calls = [
            common_pb2.ToolCall(
                id=f"call_{uuid.uuid4().hex[:16]}", name=item.name, arguments_json=item.arguments_json
            )
            for item in turn.calls
        ]
        message = common_pb2.Message(
            role="assistant", content=turn.content, reasoning_content=turn.reasoning, tool_calls=calls
        )
        usage = common_pb2.Usage(
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=len(sampled),
            cached_tokens=event.cached_tokens,
        )
        return pb.GenerateFinish(
            index=event.index,
            finish_reason=reason,
            stop_match=stop_match,
            message=message,
            usage=usage,
        )

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Score given tokens: all samples together, answered in their order."""
        wanted = await asyncio.to_thread(resolve_samples, request, self._engine.info())
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._engine.score(one)) for one in wanted]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled, or failed for the same reason
        answers = [task.result() for task in tasks]
        return pb.ScoreResponse(
            samples=[pb.ScoredSample(logprobs=one.logprobs, policy_version=one.version) for one in answers]
        )

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Not served by this build."""
        raise unimplemented("InferenceService.LoadAdapter")

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Not served by this build."""
        raise unimplemented("InferenceService.UnloadAdapter")

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        """Stop decoding between two steps."""
        return pb.PauseResponse(in_flight=await self._engine.pause())

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        """Go on."""
        return pb.ResumeResponse(in_flight=await self._engine.resume())

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        """Say what is served."""
        info = self._engine.info()
        served = info.served
        return pb.GetModelResponse(
            base_model=self._base_model,
            run_id=served.run_id if served else "",
            policy_version=served.version if served else None,
            weights_digest=served.digest if served else b"",
            engine=info.name,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            running=info.running,
            waiting=info.waiting,
            tokens_sampled=info.tokens_sampled,
            updates_applied=info.updates_applied,
            last_update_pause_ms=info.last_update_pause_ms,
            paused=info.paused,
            end_token_ids=info.end_token_ids,
        )


def _delta(event: Delta) -> pb.GenerateDelta:
    spans = [
        rollout_pb2.PolicySpan(start=span.start, length=span.length, policy_version=span.version)
        for span in event.spans
    ]
    return pb.GenerateDelta(
        index=event.index, token_ids=event.token_ids, logprobs=event.logprobs, spans=spans
    )


def _message(message: common_pb2.Message) -> dict[str, Any]:
    """A message in the form that chat templates know."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    for field in ("reasoning_content", "tool_call_id", "name"):
        if getattr(message, field):
            rendered[field] = getattr(message, field)
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": _arguments(c.arguments_json)},
            }
            for c in message.tool_calls
        ]
    return rendered


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON themselves; what is none is printed as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tool(tool: common_pb2.ToolDefinition) -> dict[str, Any]:
    try:
        parameters = (
            json.loads(tool.parameters_json) if tool.parameters_json else {"type": "object", "properties": {}}
        )
    except ValueError as error:
        raise refused("tools.parameters_json", tool.parameters_json, f"send JSON Schema ({error})") from error
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
