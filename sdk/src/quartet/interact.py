"""Be the policy of an environment that a host runs: `EnvHostService.Interact` as one iterator.

    import asyncio
    import uuid

    from quartet.interact import interact
    from quartet.kit.channel import connect
    from quartet.v1 import envhost_service_pb2 as pb
    from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub

    async def policy(question: pb.ModelQuestion) -> pb.ModelAnswer:
        # Any model, any sampler. In a thread: on the loop it holds up every other question.
        prompt, tokens, logprobs = await asyncio.to_thread(sample, question.messages)
        return pb.ModelAnswer(
            prompt_token_ids=prompt, token_ids=tokens, logprobs=logprobs, message={"content": decode(tokens)}
        )

    async with connect("localhost:50054") as channel:
        run = pb.RunRolloutsRequest(
            request_id=uuid.uuid4().hex, environment={"id": "reverse-text"}, task_index=0, members=range(8)
        )
        async for rollout in interact(EnvHostServiceStub(channel), run, policy):
            rollout.reward, rollout.samples

1. Every question is answered exactly once, side by side with the others; `policy` may wait to make batches.
2. What `policy` raises is told to the host in one line of MAX_ERROR_CHARS at most, and fails the rollout that
   asked, nothing else.
3. A host that shows no sign of life for three heartbeats is an error, not a wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from quartet.kit.call import stream
from quartet.kit.own_function import text_of
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.v1 import envhost_service_pb2, rollout_pb2

Policy = Callable[[envhost_service_pb2.ModelQuestion], Awaitable[envhost_service_pb2.ModelAnswer]]

# As much as the message of a rollout's failure has; one of any length the host may not be able to take.
MAX_ERROR_CHARS: Final = 500


async def interact(
    stub: Any, run: envhost_service_pb2.RunRolloutsRequest, policy: Policy, timeout_s: float | None = None
) -> AsyncGenerator[rollout_pb2.Rollout, None]:
    """The rollouts of `run`, each as it ends, with `policy` sampling their turns. Raises QuartetError."""
    # At most one frame for each open question, which the host bounds; None ends this side.
    said: asyncio.Queue[envhost_service_pb2.InteractRequest | None] = asyncio.Queue()
    said.put_nowait(envhost_service_pb2.InteractRequest(run=run))

    async def requests() -> AsyncGenerator[envhost_service_pb2.InteractRequest, None]:
        while (frame := await said.get()) is not None:
            yield frame

    async def answer(question: envhost_service_pb2.ModelQuestion) -> None:
        call_id, answering_it = question.call_id, asyncio.current_task()
        assert answering_it is not None
        # A message of its own, which is no other one's: a policy may give one answer to several questions.
        reply = envhost_service_pb2.ModelAnswer()
        try:
            reply.CopyFrom(await policy(question))
        # The caller's own code, which may have what it waits for cancelled; the host types it.
        except (Exception, asyncio.CancelledError) as error:
            if answering_it.cancelling():  # the stream was left
                raise
            reply = envhost_service_pb2.ModelAnswer(error=_told(error))
        reply.call_id = call_id
        said.put_nowait(envhost_service_pb2.InteractRequest(answer=reply))

    answering: set[asyncio.Task[None]] = set()
    try:
        call = stub.Interact(requests(), timeout=timeout_s)
        beating: Any = stream(call, idle_timeout_s=IDLE_TIMEOUT_SECONDS, sends=True)
        async with aclosing(beating) as frames:
            async for frame in frames:
                which = frame.WhichOneof("frame")
                if which == "rollout":
                    yield frame.rollout
                elif which == "question":
                    task = asyncio.create_task(answer(frame.question))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
    finally:
        said.put_nowait(None)
        for task in answering:
            task.cancel()


def _told(error: BaseException) -> str:
    # Cut first: it may hold a whole batch. Half a surrogate pair no message can carry.
    text = f"{type(error).__name__}: {text_of(error)[:MAX_ERROR_CHARS]}"
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[: MAX_ERROR_CHARS - 1]}…"
