"""InferenceService over an Engine: requests in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing

import grpc
from quartet.errors import refused
from quartet.inference import line
from quartet.kit.stream import HEARTBEAT_SECONDS
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc

from quartet_inference.adapters import Adapters
from quartet_inference.answering import Answerer, Ended, Started
from quartet_inference.engine import Delta, Engine, Routed
from quartet_inference.joined import AnswerEvent, joined
from quartet_inference.scoring import resolve_samples

#: GenerateResponse.experts says so.
MAX_EXPERTS_BYTES = 1 << 20


class InferenceServicer(rpc.InferenceServiceServicer):
    """Generate, Score, LoadAdapter, UnloadAdapter, Pause, Resume, GetModel."""

    def __init__(
        self,
        engine: Engine,
        answerer: Answerer,
        adapters: Adapters,
        base_model: str,
        chat: common_pb2.ChatIdentity | None = None,
    ) -> None:
        """Serve an engine; the answerer is its way for prompts, which are made with what `chat` says."""
        self._engine = engine
        self._adapters = adapters
        self._answerer = answerer
        self._base_model = base_model
        self._chat = chat

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Sample completions."""
        answer = self._answerer.answer(request, context.time_remaining())
        if self._held_up(request):
            yield self._heartbeat(request)
        async with aclosing(joined(answer, HEARTBEAT_SECONDS)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for response in _responses(batch):
                    yield response
                if not batch:
                    yield self._heartbeat(request)

    def _held_up(self, request: pb.GenerateRequest) -> str:
        return self._answerer.held_up(request, self._adapters.verdicts.behind(request.run_id))

    def _heartbeat(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            heartbeat=common_pb2.Heartbeat(in_flight=max(1, request.n)),
            held_up=self._held_up(request),
            waits_for=self._answerer.waits_for(request),
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
        """Serve a run's adapter at its newest version, and follow it."""
        weights = await self._adapters.load(_named(request.run_id))
        return pb.LoadAdapterResponse(version=weights.version)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Serve and follow it no more."""
        await self._adapters.unload(_named(request.run_id))
        return pb.UnloadAdapterResponse()

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
        return self.model()

    def prompt_tokens(self) -> tuple[int, int]:
        """Of the prompts of completions that ended: all, and those that were not computed again."""
        return self._answerer.prompt_tokens, self._answerer.cached_tokens

    def model(self) -> pb.GetModelResponse:
        """What is served right now; for the event loop."""
        info = self._engine.info()
        served, refusals = info.served, [*info.update_refusals, *self._adapters.verdicts.all_behind]
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
            out_of_service=info.out_of_service,
            update_refused="\n".join(map(line, refusals)),
            update_refusals=[pb.UpdateRefusal(run_id=one.run_id, why=one.why) for one in refusals],
            chat=self._chat,
            prefix_breaks=self._answerer.prefix_breaks,
            adapters=[
                pb.ServedAdapter(run_id=one.run_id, policy_version=one.version, weights_digest=one.digest)
                for one in self._adapters.served()
            ],
            refused_adapters=[
                pb.RefusedAdapter(run_id=run_id, why=why)
                for run_id, why in self._adapters.verdicts.dead.items()
            ],
        )


def _named(run_id: str) -> str:
    if not run_id:
        raise refused("run_id", "empty", "name the run whose adapter it is")
    return run_id


def _responses(batch: Sequence[AnswerEvent]) -> Iterator[pb.GenerateResponse]:
    """As few messages as say it: each costs both ends more than the tokens in it."""
    response = pb.GenerateResponse()
    for event in batch:
        routed = event.routed if isinstance(event, Ended) else None
        full = response.HasField("finish") or (response.HasField("delta") and isinstance(event, Delta))
        if full or (routed is not None and response.ListFields()):
            yield response
            response = pb.GenerateResponse()
        if routed is not None:
            yield from _experts(routed)
        _add(response, event)
    if batch:
        yield response


def _experts(routed: Routed) -> Iterator[pb.GenerateResponse]:
    """Parts of at most MAX_EXPERTS_BYTES, or of one token."""
    tokens, layers, slots = routed.experts.shape
    width = routed.experts.itemsize
    step = max(1, MAX_EXPERTS_BYTES // (layers * slots * width))
    for first in range(0, tokens, step):
        numbers = routed.experts[first : first + step].astype(f"<u{width}", copy=False).tobytes()
        experts = rollout_pb2.RoutedExperts(
            start=routed.start + first, layers=layers, slots=slots, width=width, numbers=numbers
        )
        yield pb.GenerateResponse(experts=pb.GenerateExperts(index=routed.index, experts=experts))


def _add(response: pb.GenerateResponse, event: AnswerEvent) -> None:
    if isinstance(event, Delta):
        delta = response.delta
        delta.index = event.index
        delta.token_ids.extend(event.token_ids)
        delta.logprobs.extend(event.logprobs)
        for span in event.spans:
            delta.spans.add(start=span.start, length=span.length, policy_version=span.version)
            if span.weights_id:
                delta.weights.add(policy_version=span.version, weights_id=span.weights_id)
    elif isinstance(event, Started):
        response.start.prefix_kept = event.kept
        response.start.prompt_token_ids.extend(event.prompt if event.rendered else ())
    else:
        finish = response.finish
        finish.index = event.index
        finish.finish_reason = event.reason
        finish.stop_match = event.stop_match
        finish.message.CopyFrom(event.message)
        finish.usage.prompt_tokens = event.prompt_tokens
        finish.usage.completion_tokens = event.completion_tokens
        finish.usage.cached_tokens = event.cached_tokens
