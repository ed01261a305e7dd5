"""The WeightService of a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from quartet.errors import unimplemented
from quartet.v1 import weights_pb2, weights_pb2_grpc


class UnservedWeights(weights_pb2_grpc.WeightServiceServicer):
    """The replica's relay is not part of this build: every RPC says so."""

    async def Watch(
        self, request: weights_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weights_pb2.WatchResponse]:
        """Not served by this build."""
        raise unimplemented("WeightService.Watch")
        yield  # a stream, so that the kit parses its request

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.GetManifestResponse:
        """Not served by this build."""
        raise unimplemented("WeightService.GetManifest")

    async def Fetch(
        self, request: weights_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weights_pb2.FetchResponse]:
        """Not served by this build."""
        raise unimplemented("WeightService.Fetch")
        yield  # a stream, so that the kit parses its request

    async def Push(
        self, request_iterator: Any, context: grpc.aio.ServicerContext
    ) -> weights_pb2.PushResponse:
        """Not served by this build."""
        raise unimplemented("WeightService.Push")
