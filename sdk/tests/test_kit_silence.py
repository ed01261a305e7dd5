"""What gRPC's C core prints by itself."""

from __future__ import annotations

import os
import subprocess
import sys

#: Streams whose server goes away; whether the client is told so before they end is a race each time.
CUT = """
import asyncio
from quartet.errors import from_rpc
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

class Endless(health_pb2_grpc.HealthServicer):
    async def Watch(self, request, context):
        yield health_pb2.HealthCheckResponse(status=1)
        await asyncio.sleep(60)

async def main():
    for _ in range(8):
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(Endless(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await call.read()
            await server.stop(0)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                print(from_rpc(error).reason)

asyncio.run(main())
"""


def test_a_peer_that_goes_away_is_told_as_an_error_and_by_no_lines_of_grpc() -> None:
    own = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, timeout=60, env=own)
    assert done.stdout.split() == ["NOT_READY"] * 8
    assert "chttp2_transport" not in done.stderr
    loud = subprocess.run(
        [sys.executable, "-c", "import os, quartet; print(os.environ['GRPC_VERBOSITY'])"],
        capture_output=True,
        text=True,
        timeout=60,
        env=own | {"GRPC_VERBOSITY": "INFO"},
    )
    assert loud.stdout.split() == ["INFO"], "whoever asks for them has them"
