"""A process that runs rollouts on demand: reads a count per line, runs as many, and answers with a line of
JSON: the seconds that took and the CPU seconds of this process and its children's.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable


async def serve(run: Callable[[int], Awaitable[object]], in_flight: int) -> None:
    """Say that all is loaded, then answer until stdin ends. `run` does the rollout of a task index."""

    async def bounded(index: int) -> None:
        async with places:
            await run(index % 1000)

    places = asyncio.Semaphore(in_flight)
    print("{}", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(bounded(index) for index in range(int(line))))
        answer = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)
