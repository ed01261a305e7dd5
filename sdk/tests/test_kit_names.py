"""A service that has another address behind its name now: a pod that was scheduled anew."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.kit.health import Health
from quartet.kit.options import client_options
from quartet.kit.server import ServerConfig, start

#: Two looks, an attempt that was under way, and a machine under test load. The default alone is 30 s.
SECONDS = 15.0
_A = 1


class Names(asyncio.DatagramProtocol):
    """A name server that has one address for whatever it is asked."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        answer = b""
        if kind == _A:
            self.asked += 1
            answer = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, 4) + socket.inet_aton(self.address)
        counts = struct.pack("!HHHHH", 0x8180, 1, 1 if answer else 0, 0, 0)
        self._transport.sendto(data[:2] + counts + data[12:end] + answer, addr)


@pytest.mark.parametrize("moves_after_s", [0.0, 3.0])
async def test_a_service_that_moved_is_found_within_seconds(moves_after_s: float) -> None:
    """After a while, too, in which the name still has the address where nobody is."""
    check = health_pb2.HealthCheckRequest(service="liveness")
    async with AsyncExitStack() as opened:
        transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Names("127.0.0.2"), local_addr=("127.0.0.1", 0)
        )
        opened.callback(transport.close)
        name_server = "{}:{}".format(*transport.get_extra_info("sockname"))
        before = await start([], ServerConfig(address="127.0.0.2:0"), Health())
        opened.push_async_callback(before.stop, 0)
        port = before.address.rpartition(":")[2]
        target = f"dns://{name_server}/trainer.example:{port}"
        channel = await opened.enter_async_context(grpc.aio.insecure_channel(target, client_options()))
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(check, timeout=10)
        assert names.asked == 1, "the name is looked up there, and not on this machine"
        await before.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Check(check, timeout=10)
        await asyncio.sleep(moves_after_s)
        after = await start([], ServerConfig(address=f"127.0.0.3:{port}"), Health())
        opened.push_async_callback(after.stop, 0)
        names.address, moved = "127.0.0.3", time.monotonic()
        answer = await stub.Check(check, timeout=SECONDS, wait_for_ready=True)
        print(f"found after {time.monotonic() - moved:.1f} s, {names.asked} looks")
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert names.asked <= 5, "no flood of questions"
