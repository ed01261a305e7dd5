"""EnvHostService over gRPC: checks requests, hands them to the host, frames its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc
from quartet import template_settings
from quartet.errors import QuartetError, refused
from quartet.kit.stream import with_heartbeats
from quartet.run.hosted import MAX_GROUP, MAX_RETRIES, MAX_TASKS, MAX_TIMEOUT_SECONDS
from quartet.sampled_by import Told
from quartet.v1 import common_pb2, envhost_service_pb2, envhost_service_pb2_grpc, rollout_pb2
from quartet.wanted import check_wanted

from quartet_envhost.dialogue import Dialogue
from quartet_envhost.host import EnvironmentHost

SERVICE_NAME: Final = "quartet.v1.EnvHostService"
# Whoever opens a call has its first frame at hand; until that comes it holds one of the server's places.
OPENING_SECONDS: Final = 15.0


class EnvHostServicer(envhost_service_pb2_grpc.EnvHostServiceServicer):
    """Serves one EnvironmentHost."""

    def __init__(self, host: EnvironmentHost) -> None:
        """Serve a host."""
        self._host = host

    async def ListEnvironments(
        self, request: envhost_service_pb2.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> envhost_service_pb2.ListEnvironmentsResponse:
        """List what is hosted."""
        return envhost_service_pb2.ListEnvironmentsResponse(environments=self._host.hosted())

    async def DescribeEnvironment(
        self, request: envhost_service_pb2.DescribeEnvironmentRequest, context: grpc.aio.ServicerContext
    ) -> envhost_service_pb2.DescribeEnvironmentResponse:
        """Load and describe an environment."""
        _check_ref(request.environment)
        info = await self._host.describe(request.environment)
        return envhost_service_pb2.DescribeEnvironmentResponse(environment=info)

    async def GetTasks(
        self, request: envhost_service_pb2.GetTasksRequest, context: grpc.aio.ServicerContext
    ) -> envhost_service_pb2.GetTasksResponse:
        """List examples."""
        _check_ref(request.environment)
        _check_split(request.split)
        if not 1 <= request.count <= MAX_TASKS:
            raise refused("count", request.count, f"ask for 1 to {MAX_TASKS} tasks at a time")
        return await self._host.tasks(request)

    async def RunRollouts(
        self, request: envhost_service_pb2.RunRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[envhost_service_pb2.RunRolloutsResponse]:
        """Run the members of a group."""
        _check_run(request)

        def heartbeat() -> envhost_service_pb2.RunRolloutsResponse:
            in_flight = self._host.unfinished(request.request_id)
            return envhost_service_pb2.RunRolloutsResponse(
                heartbeat=common_pb2.Heartbeat(in_flight=in_flight),
                held_up=self._host.held_up(request.request_id),
                waits_for=self._host.waits_for(request.request_id),
                queued=self._host.queued(request.request_id),
                places=self._host.places(request.request_id),
            )

        # Closed explicitly: a stream that is left must cancel its rollouts now, not when it is collected.
        beating: Any = with_heartbeats(self._frames(request), heartbeat)
        async with aclosing(beating) as frames:
            async for frame in frames:
                yield frame

    async def _frames(
        self, request: envhost_service_pb2.RunRolloutsRequest
    ) -> AsyncGenerator[envhost_service_pb2.RunRolloutsResponse, None]:
        told, sampled_by = "", Told()
        async with aclosing(self._host.run(request)) as rollouts:
            async for rollout in rollouts:
                digest = self._host.digest(request.request_id)
                news = digest if digest != told else ""
                told = digest
                frame = sampled_by.frame(rollout)
                frame.environment_digest = news
                yield frame

    async def Interact(
        self,
        request_iterator: AsyncIterator[envhost_service_pb2.InteractRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[envhost_service_pb2.InteractResponse]:
        """Run the members of a group with the client as their policy."""
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                opening = await anext(aiter(request_iterator), None)
        except TimeoutError:
            raise refused("frame", "", f"begin with what to run, within {OPENING_SECONDS:g} s") from None
        if opening is None or opening.WhichOneof("frame") != "run":
            raise refused("frame", "" if opening is None else "answer", "begin with what to run")
        _check_run(opening.run)

        def heartbeat() -> envhost_service_pb2.InteractResponse:
            in_flight = self._host.unfinished(opening.run.request_id)
            return envhost_service_pb2.InteractResponse(heartbeat=common_pb2.Heartbeat(in_flight=in_flight))

        beating: Any = with_heartbeats(self._talk(opening.run, request_iterator), heartbeat)
        async with aclosing(beating) as frames:
            async for frame in frames:
                yield frame

    async def _talk(
        self,
        request: envhost_service_pb2.RunRolloutsRequest,
        said: AsyncIterator[envhost_service_pb2.InteractRequest],
    ) -> AsyncGenerator[envhost_service_pb2.InteractResponse, None]:
        dialogue = Dialogue()
        listener = asyncio.create_task(_listen(dialogue, said))
        try:
            async with aclosing(self._host.interact(request, dialogue)) as frames:
                async for frame in frames:
                    if isinstance(frame, rollout_pb2.Rollout):
                        yield envhost_service_pb2.InteractResponse(rollout=frame)
                    else:
                        yield envhost_service_pb2.InteractResponse(question=frame)
        finally:
            listener.cancel()

    async def Cancel(
        self, request: envhost_service_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> envhost_service_pb2.CancelResponse:
        """End rollouts."""
        count = self._host.cancel(request.run_id, list(request.request_ids))
        return envhost_service_pb2.CancelResponse(cancelled=count)


async def _listen(dialogue: Dialogue, said: AsyncIterator[envhost_service_pb2.InteractRequest]) -> None:
    """Take the client's answers until it ends its side; what is no answer ends the call."""
    try:
        async for frame in said:
            if frame.WhichOneof("frame") != "answer":
                raise refused("frame", frame.WhichOneof("frame") or "", "send answers after the opening")
            dialogue.answer(frame.answer)
    except QuartetError as error:
        dialogue.refuse(error)
    finally:
        dialogue.end()


def _check_ref(ref: envhost_service_pb2.EnvironmentRef) -> None:
    if not ref.id:
        raise refused("environment.id", "", 'name an environment, such as "reverse-text"')


def _check_split(split: int) -> None:
    if split not in envhost_service_pb2.Split.values():  # enums of proto3 are open
        raise refused("split", split, "choose train or eval")


def _check_run(request: envhost_service_pb2.RunRolloutsRequest) -> None:
    _check_ref(request.environment)
    _check_split(request.split)
    check_wanted(request)
    if not request.request_id:
        raise refused("request_id", "", "give every attempt an id of its own")
    if not 1 <= len(request.members) <= MAX_GROUP:
        raise refused("members", len(request.members), f"name 1 to {MAX_GROUP} members")
    if len(set(request.members)) != len(request.members):
        raise refused("members", list(request.members), "name each member once")
    try:
        template_settings.read(request.template_settings)
    except ValueError as error:
        raise refused("template_settings", request.template_settings, str(error)) from error
    if request.max_retries > MAX_RETRIES:
        raise refused("max_retries", request.max_retries, f"at most {MAX_RETRIES}")
    if request.timeout_ms > MAX_TIMEOUT_SECONDS * 1000:
        remedy = f"give at most {MAX_TIMEOUT_SECONDS * 1000:.0f}, a week, or 0 for the host's own limit"
        raise refused("timeout_ms", request.timeout_ms, remedy)
