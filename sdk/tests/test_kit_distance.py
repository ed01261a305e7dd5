"""Peers that are far away: a connection whose first answer takes its time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, start

#: Four roundtrips of a connection with TLS to the other side of the earth, or a first packet that was lost.
FAR_SECONDS = 1.2


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_peer_whose_connection_takes_a_second_is_reached_by_the_first_call() -> None:
    server = await start([], ServerConfig(), Health())
    host, port = server.address.rsplit(":", 1)
    attempts = 0

    async def far(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(FAR_SECONDS)
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pipe(reader, back), _pipe(there, writer))

    way = await asyncio.start_server(far, "127.0.0.1", 0)
    address = f"127.0.0.1:{way.sockets[0].getsockname()[1]}"
    try:
        async with connect(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            # No wait_for_ready: a failed attempt to connect is a failed call.
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert attempts == 1
    finally:
        way.close()
        await server.stop(0)
