"""Rollouts through the whole road: client -> environment host -> policy over gRPC -> back.

1. A four-turn environment with a stub policy, classic and v1, with one worker: rollouts per second of the
   road, of the same Verifiers code in one process with no transport at all, and of Verifiers' own environment
   server with the same policy behind HTTP. The three take turns, round by round, in one run; medians are
   compared. Bars: at least 0.6 of the bare code, at least twice the environment server.
2. Many rollouts in flight in one host: what front and worker hold for them, and how long it takes until all
   of them, cancelled, have come back. Bar: a second for 1,000.

    make classic && python benchmarks/rollouts.py [--rollouts N] [--rounds N] [--in-flight N] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from figures import Figure, arguments, report
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.logs import configure
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import common_pb2, envhost_service_pb2, envhost_service_pb2_grpc
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.process import WorkerProcess
from quartet_envhost.service import SERVICE_NAME, EnvHostServicer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOUR_TURNS = HERE / "four_turns"
# generation: its interpreter, its environment, and how many rollouts a round has of those asked for.
GENERATIONS: Final = {
    "classic": (ROOT / ".venv-envs-classic/bin/python", "four-turns-classic", 1.0),
    "v1": (ROOT / ".venv-envs/bin/python", "four-turns", 0.25),
}
GROUP = 8
AT_ONCE = 128
# Turns of the rollouts that are cancelled take this long, so that all of them are under way at once.
SLOW_S = 60.0


@contextmanager
def policy(*options: str) -> Iterator[dict[str, str]]:
    """The addresses of a stub policy."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "stub_policy.py"), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


class Plain:
    """Verifiers by itself, in its own interpreter: rounds of rollouts."""

    def __init__(self, generation: str, mode: str, policy_url: str) -> None:
        """Start it and wait until it is loaded."""
        python = GENERATIONS[generation][0]
        command = [str(python), str(FOUR_TURNS / f"plain_{generation}.py"), mode, str(AT_ONCE), policy_url]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(FOUR_TURNS)},
        )
        self._answer()

    def round(self, count: int) -> float:
        """Rollouts per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return count / float(self._answer()["seconds"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended; see above")
        answer: dict[str, float] = json.loads(line)
        return answer


class Road:
    """An environment host behind its service, and a client of it."""

    def __init__(self, host: EnvironmentHost, stub: Any, env_id: str) -> None:
        """Use a running one."""
        self.host, self._stub, self._env_id = host, stub, env_id
        self._requests = 0

    def request(self, count: int, max_retries: int) -> envhost_service_pb2.RunRolloutsRequest:
        """A group of the next task."""
        self._requests += 1
        return envhost_service_pb2.RunRolloutsRequest(
            run_id="benchmark",
            request_id=str(self._requests),
            environment={"id": self._env_id},
            task_index=self._requests % 1000,
            members=range(count),
            sampling=common_pb2.SamplingParams(max_tokens=64),
            timeout_ms=600_000,
            max_retries=max_retries,
        )

    async def run(self, count: int, max_retries: int = 0) -> AsyncIterator[Any]:
        """The rollouts of a group, as they end."""
        async for frame in self._stub.RunRollouts(self.request(count, max_retries), timeout=600):
            if frame.HasField("rollout"):
                yield frame.rollout

    async def group(self, count: int) -> list[Any]:
        """The rollouts of a group."""
        return [rollout async for rollout in self.run(count)]

    async def round(self, count: int) -> float:
        """Rollouts per second; each is checked to be whole."""
        places = asyncio.Semaphore(AT_ONCE // GROUP)

        async def one() -> None:
            async with places:
                for rollout in await self.group(GROUP):
                    assert rollout.reward == 1.0 and rollout.num_turns == 4, rollout
                    assert len(rollout.samples) == 1 and rollout.prefix_breaks == 0

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count // GROUP)))
        return count / (time.perf_counter() - started)

    async def cancel(self) -> None:
        """Everything of this client."""
        await self._stub.Cancel(envhost_service_pb2.CancelRequest(run_id="benchmark"), timeout=60)

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that are alive."""
        (pool,) = self.host._pools.values()
        return [worker for worker in pool.workers if worker.alive]

    @property
    def processes(self) -> list[int]:
        """The front, which is this process, and its workers."""
        return [os.getpid(), *(worker.pid for worker in self.workers)]


@asynccontextmanager
async def road(generation: str, inference: str, **settings: object) -> AsyncIterator[Road]:
    """A loaded host with one worker."""
    python, env_id, _ = GENERATIONS[generation]
    environment = {"python": str(python), "env": {"PYTHONPATH": str(FOUR_TURNS)}, **settings}
    host = EnvironmentHost(
        EnvHostConfig.model_validate(
            {"inference_addresses": [inference], "environments": {env_id: environment}}
        )
    )
    health = Health()
    health.set_ready(SERVICE_NAME)
    add: Any = envhost_service_pb2_grpc.add_EnvHostServiceServicer_to_server
    server = await start([Service(SERVICE_NAME, add, EnvHostServicer(host))], ServerConfig(), health)
    async with connect(server.address) as channel:
        stub: Any = envhost_service_pb2_grpc.EnvHostServiceStub(channel)  # type: ignore[no-untyped-call]
        await host.describe(envhost_service_pb2.EnvironmentRef(id=env_id))
        yield Road(host, stub, env_id)
    await server.stop(0)
    await host.close()


async def rates(generation: str, rollouts: int, rounds: int) -> list[Figure]:
    """The three ways in turn."""
    count = int(rollouts * GENERATIONS[generation][2]) // GROUP * GROUP
    with policy() as addresses:
        plain = [Plain(generation, mode, addresses["http"]) for mode in ("alone", "server")]
        async with road(generation, addresses["grpc"]) as ours:
            found: dict[str, list[float]] = {"road": [], "alone": [], "server": []}
            for index in range(rounds + 1):  # the first warms up
                found["alone"].append(await asyncio.to_thread(plain[0].round, count))
                found["road"].append(await ours.round(count))
                found["server"].append(await asyncio.to_thread(plain[1].round, count))
                if not index:
                    found = {name: [] for name in found}
        for one in plain:
            one.close()
    median = {name: statistics.median(values) for name, values in found.items()}
    return [
        Figure(f"{generation}: the whole road", median["road"], "rollouts/s"),
        Figure(f"{generation}: Verifiers in one process", median["alone"], "rollouts/s"),
        Figure(f"{generation}: Verifiers' environment server", median["server"], "rollouts/s"),
        Figure(f"{generation}: of one process", median["road"] / median["alone"], "x", ">= 0.6"),
        Figure(f"{generation}: of the server", median["road"] / median["server"], "x", ">= 2"),
    ]


def rss_mib(pids: list[int]) -> float:
    """What processes hold."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


async def crowd(generation: str, count: int) -> list[Figure]:
    """Memory of so many rollouts in flight, and the time to cancel them."""
    with policy("--delay", str(SLOW_S)) as addresses:
        async with road(generation, addresses["grpc"], rollouts_per_worker=count) as ours:
            idle = rss_mib(ours.processes)
            groups = [asyncio.create_task(ours.group(GROUP)) for _ in range(count // GROUP)]
            while sum(one.open_calls for one in ours.workers) < count // GROUP * GROUP:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)  # until all of them wait for the policy
            held = rss_mib(ours.processes)
            started = time.perf_counter()
            await ours.cancel()
            rollouts = [one for group in await asyncio.gather(*groups) for one in group]
            seconds = time.perf_counter() - started
    assert len(rollouts) == count // GROUP * GROUP
    assert all(rollout.HasField("failure") for rollout in rollouts)
    return [
        Figure(f"{generation}: host with {len(rollouts)} rollouts in flight", held, "MiB"),
        Figure(f"{generation}: of that, for each rollout", (held - idle) * 1024 / len(rollouts), "KiB"),
        Figure(f"{generation}: cancelling them all", seconds, "s", "<= 1"),
    ]


async def measure(options: Any) -> list[Figure]:
    """Both generations."""
    figures = []
    for generation in GENERATIONS:
        figures += await rates(generation, options.rollouts, options.rounds)
        figures += await crowd(generation, options.in_flight)
    return figures


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=1024, help="of a round; v1 does a quarter of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=1000)
    options = parser.parse_args()
    configure("benchmark", "warning")
    report(asyncio.run(measure(options)), options.json)


if __name__ == "__main__":
    main()
