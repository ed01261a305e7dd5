"""How many single-turn rollouts one worker core runs: the whole way over gRPC, against a policy that
answers at once.

The policy is a separate process, so that its CPU time is not in the worker's figure. Measured once the
environment is loaded and WARM_UP groups have run. Printed: rollouts per second of wall time, CPU milliseconds
per rollout of worker and front, and the worker's rate alone (1 / its CPU per rollout).

    python benchmarks/envhost.py [--rollouts 2048] [--group 8] [--concurrency 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "services/envhost/tests"))

from figures import Figure, arguments, report  # noqa: E402
from quartet.kit.logs import configure  # noqa: E402
from quartet.v1 import common_pb2, envhost_service_pb2  # noqa: E402
from quartet_envhost.config import EnvHostConfig  # noqa: E402
from quartet_envhost.host import EnvironmentHost  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP = 8


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def policy() -> None:
    """Serve the scripted policy until stdin closes."""
    from scripted_inference import ScriptedInference, serve_scripted

    server = await serve_scripted(ScriptedInference())
    print(server.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


async def measure(address: str, rollouts: int, group: int, concurrency: int, python: str) -> list[Figure]:
    """Run the rollouts in groups and measure."""
    host = EnvironmentHost(EnvHostConfig(inference_addresses=[address], python=python))
    ref = envhost_service_pb2.EnvironmentRef(id="reverse-text")
    started = time.perf_counter()
    await host.describe(ref)
    loaded = time.perf_counter() - started
    (pool,) = host._pools.values()
    worker = pool.workers[0].pid
    gate = asyncio.Semaphore(concurrency // group)

    async def one(index: int) -> float:
        request = envhost_service_pb2.RunRolloutsRequest(
            request_id=str(index),
            environment=ref,
            task_index=index % 1000,
            members=range(group),
            sampling=common_pb2.SamplingParams(max_tokens=64, temperature=1.0, seed=1),
        )
        async with gate:
            return sum([rollout.reward async for rollout in host.run(request)])

    await asyncio.gather(*(one(-1 - i) for i in range(WARM_UP)))
    before = cpu_seconds(worker), time.process_time(), time.perf_counter()
    groups = rollouts // group
    rewards = await asyncio.gather(*(one(i) for i in range(groups)))
    wall = time.perf_counter() - before[2]
    count = groups * group
    assert sum(rewards) == count, "every answer is right"
    worker_ms = (cpu_seconds(worker) - before[0]) * 1000 / count
    front_ms = (time.process_time() - before[1]) * 1000 / count
    await host.close()
    return [
        Figure("loading the environment", loaded, "s"),
        Figure("whole way", count / wall, "rollouts/s"),
        Figure("worker", worker_ms, "CPU ms/rollout"),
        Figure("front", front_ms, "CPU ms/rollout"),
        Figure("one worker core", 1000 / worker_ms, "rollouts/s"),
    ]


def main() -> None:
    """Run both processes and report the figures."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--python", default=str(ROOT / ".venv-envs/bin/python"))
    parser.add_argument("--policy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure("benchmark", "warning")
    if options.policy:
        asyncio.run(policy())
        return
    command = [sys.executable, __file__, "--policy"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        figures = asyncio.run(
            measure(address, options.rollouts, options.group, options.concurrency, options.python)
        )
        assert server.stdin is not None
        server.stdin.close()
    report(figures, options.json)


if __name__ == "__main__":
    main()
