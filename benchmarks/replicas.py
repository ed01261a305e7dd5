"""What the client of many replicas costs, and what a generation notices of a replica that dies.

1. CPU time of the client for each generation of 128 tokens, `Replicas.complete` against a plain loop over the
   stub that collects the same, by turns in one process, 64 in flight; the replica is another process that
   answers at once. The best of ROUNDS each.
2. Three replicas that send four tokens every PACE_MS; one is killed with SIGKILL while 64 generations run.
   The longest wait for a next frame, with and without the kill, and the tokens that differ from those of an
   undisturbed generation.

    python benchmarks/replicas.py [--json FILE]
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from figures import Figure, arguments, report
from quartet.kit.call import stream
from quartet.kit.channel import connect
from quartet.kit.logs import configure
from quartet.replicas import Replicas
from quartet.replicas.choice import ranking
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / of) for of in ("sdk/tests", "tests/devices")]

IN_FLIGHT, GENERATIONS, ROUNDS = 64, 512, 5
TOKENS, LONG = 128, 400
PACE_MS = 10.0
TIMEOUT_S = 120.0


async def serve(pace_ms: float) -> None:
    """A scripted replica until its stdin closes."""
    from scripted_replica import ScriptedReplica

    replica = ScriptedReplica()
    replica.piece_tokens = 4 if pace_ms else 32
    if pace_ms:
        replica.before_piece = lambda _at: asyncio.sleep(pace_ms / 1000)
    await replica.begin()
    print(replica.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def started(stack: ExitStack, pace_ms: float) -> tuple[str, subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--serve", str(pace_ms)]
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip(), process


def request_of(number: int, tokens: int) -> pb.GenerateRequest:
    message = common_pb2.Message(role="user", content=f"prompt {number}")
    return pb.GenerateRequest(
        messages=pb.MessagesPrompt(messages=[message]),
        sampling=common_pb2.SamplingParams(max_tokens=tokens, seed=number + 1),
        session_id=f"session {number}",
        n=1,
    )


async def plain(stub: Any, request: pb.GenerateRequest) -> list[int]:
    """What a client without Replicas would do."""
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    async for frame in stream(stub.Generate(request, timeout=TIMEOUT_S), idle_timeout_s=TIMEOUT_S):
        if frame.HasField("delta"):
            tokens.extend(frame.delta.token_ids)
            logprobs.extend(frame.delta.logprobs)
            spans.extend((s.start, s.length, s.policy_version) for s in frame.delta.spans)
    assert len(tokens) == len(logprobs) == spans[-1][0] + spans[-1][1]
    return tokens


async def cpu_ms(one: Callable[[pb.GenerateRequest], Awaitable[object]]) -> float:
    """Of this process, for each generation."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def placed(number: int) -> None:
        async with places:
            await one(request_of(number, TOKENS))

    before = time.process_time()
    await asyncio.gather(*(placed(number) for number in range(GENERATIONS)))
    return (time.process_time() - before) * 1000 / GENERATIONS


async def overhead() -> list[Figure]:
    with ExitStack() as stack:
        address, _ = started(stack, 0.0)
        async with connect(address) as channel, Replicas([address]) as replicas:
            make_stub: Any = InferenceServiceStub
            stub = make_stub(channel)
            with_stub, with_replicas = [], []
            for _ in range(ROUNDS):
                with_stub.append(await cpu_ms(lambda request: plain(stub, request)))
                with_replicas.append(await cpu_ms(lambda request: replicas.complete(request, TIMEOUT_S)))
    return [
        Figure("client CPU per generation, plain stub", min(with_stub), "ms"),
        Figure("client CPU per generation, Replicas", min(with_replicas), "ms"),
        Figure("Replicas over plain stub", min(with_replicas) / min(with_stub), "x"),
    ]


async def waits(*, kill: bool) -> tuple[float, int, int]:
    """The longest wait for a frame in ms, generations carried on, tokens unlike the undisturbed ones."""
    from scripted_replica import undisturbed

    with ExitStack() as stack:
        processes = dict(started(stack, PACE_MS) for _ in range(3))
        requests = [request_of(number, LONG) for number in range(IN_FLIGHT)]
        homes = [ranking(request.session_id, list(processes))[0] for request in requests]
        victim = max(processes, key=homes.count)
        longest = wrong = 0
        async with Replicas(list(processes)) as replicas:
            # Connected and answered once, so that what is waited for is sampling.
            await asyncio.gather(*(replicas.complete(request_of(n, 4), TIMEOUT_S) for n in range(IN_FLIGHT)))

            async def one(number: int, request: pb.GenerateRequest) -> None:
                nonlocal longest, wrong
                tokens: list[int] = []
                last = time.perf_counter()
                async for frame in replicas.generate(request, TIMEOUT_S):
                    now = time.perf_counter()
                    longest, last = max(longest, now - last), now
                    tokens.extend(frame.delta.token_ids)
                wanted = undisturbed(f"prompt {number}", LONG, number + 1)
                wrong += abs(len(tokens) - LONG) + sum(a != b for a, b in zip(tokens, wanted, strict=False))

            running = asyncio.gather(*(one(*item) for item in enumerate(requests)))
            await asyncio.sleep(PACE_MS * LONG / 4 / 1000 / 2)
            if kill:
                processes[victim].kill()
            await running
            return longest * 1000, replicas.counts.carried_on, wrong


async def death() -> list[Figure]:
    calm, none, wrong_calm = await waits(kill=False)
    killed, carried, wrong = await waits(kill=True)
    assert none == wrong_calm == 0 and carried, "the kill came while generations ran, and only then"
    return [
        Figure("longest wait for tokens, all replicas alive", calm, "ms"),
        Figure("longest wait for tokens, one of three killed", killed, "ms"),
        Figure("generations carried on", carried, "of 64"),
        Figure("tokens lost, doubled or different", wrong, "tokens", "== 0"),
    ]


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--serve", type=float, help="internal: be a replica")
    options = parser.parse_args()
    configure("benchmark", "error")
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    figures = asyncio.run(overhead()) + asyncio.run(death())
    report(figures, options.json, in_flight=IN_FLIGHT, pace_ms=PACE_MS)


if __name__ == "__main__":
    main()
