"""Programs that a service starts, beside its gRPC."""

from __future__ import annotations

import os
import subprocess
import sys

#: Of which one in a hundred died of the C core's handlers of forks.
PROGRAMS = 500
SCRIPT = """
import asyncio, collections, os
import quartet
import grpc, uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, start

async def main():
    running = await start([], ServerConfig(), Health())
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async def asks():
            while True:
                await stub.Check(health_pb2.HealthCheckRequest())
                await asyncio.sleep(0.001)
        asking = asyncio.create_task(asks())
        codes = collections.Counter()
        for _ in range(PROGRAMS):
            started = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.PIPE)
            codes[await started.wait()] += 1
        asking.cancel()
        print(dict(codes))
    await running.stop(0)

uvloop.run(main())
"""


def test_a_program_does_not_die_of_the_fork_that_starts_it() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", SCRIPT.replace("PROGRAMS", str(PROGRAMS))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == str({0: PROGRAMS}), done.stdout + done.stderr
