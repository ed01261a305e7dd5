"""What the trainer service adds to the work: ForwardBackward and OptimStep, from another process, on a run
that computes nothing.

The server is the trainer as it is served (streams assembled and checked, digests, sequence, worker thread),
but its runs answer at once. The client is the orchestrator's: rollouts become frames, one call after the
other. Reported is the median time of the two calls together; beside it the same messages through bare
grpc.aio servers and clients, call by call in turns, which is the floor.

Bars: 1.5 ms for 16 samples of 64 tokens, 4 ms for 64 of 512. (The Tinker SDK has 7.4 and 13.5 ms of its own.)

    python benchmarks/trainer_call.py [--calls 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import uvloop
from figures import Figure, arguments, report
from quartet.kit.call import unary
from quartet.kit.channel import connect
from quartet.kit.memory import tune_allocator
from quartet.v1 import rollout_pb2 as rollout
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc
from quartet_orchestrator.batches import frames

#: Samples, tokens of each, bar in milliseconds.
SHAPES = ((16, 64, "<= 1.5"), (64, 512, "<= 4"))
VOCABULARY = 151_000
CALL_SECONDS = 60.0
WARM_UP = 20


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_nothing(options.serve)
        return
    tune_allocator()  # as every service does; the client is the orchestrator's
    with tempfile.TemporaryDirectory(prefix="quartet-call-") as folder:
        command = [sys.executable, __file__, "--serve", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(folder) / "port"
            while not port_file.exists():
                assert server.poll() is None, "the server ended"
                time.sleep(0.05)
            bare = (Path(folder) / "bare").read_text()
            figures = uvloop.run(measure(port_file.read_text().strip(), bare, folder, options.calls))
        finally:
            server.terminate()
            server.wait()
    report(figures, options.json)


async def measure(address: str, bare_address: str, folder: str, calls: int) -> list[Figure]:
    """All shapes, one after the other."""
    figures = []
    async with connect(address) as channel, grpc.aio.insecure_channel(bare_address) as bare_channel:
        stub, bare = rpc.TrainerServiceStub(channel), rpc.TrainerServiceStub(bare_channel)
        for samples, tokens, bar in SHAPES:
            run_id = f"{samples}-{tokens}"
            spec = pb.RunSpec(base_model=f"{folder}/model", optimizer=pb.OptimizerSpec(learning_rate=1e-3))
            create = pb.CreateRunRequest(run_id=run_id, spec=spec)
            await unary(stub.CreateRun, create, timeout_s=CALL_SECONDS)
            batch = rollouts(samples, tokens)
            prepared = list(frames(pb.ForwardBackwardStart(), batch, [[0.25]] * samples))
            times, floor = [], []
            for number in range(WARM_UP + calls):
                times.append(await both_calls(stub, run_id, batch, 1 + 2 * number))
                floor.append(await both_bare(bare, prepared))
            name = f"{samples} x {tokens} tokens: both calls"
            figures.append(Figure(f"{name}, p50", statistics.median(times[WARM_UP:]), "ms", bar))
            figures.append(Figure(f"{name}, bare gRPC, p50", statistics.median(floor[WARM_UP:]), "ms"))
    return figures


async def both_calls(stub: Any, run_id: str, batch: list[rollout.Rollout], seq_id: int) -> float:
    """Milliseconds of a ForwardBackward and an OptimStep."""
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
    start = pb.ForwardBackwardStart(run_id=run_id, seq_id=seq_id, loss=loss, normalizer=1.0)
    step = pb.OptimStepRequest(run_id=run_id, seq_id=seq_id + 1)
    began = time.perf_counter()
    sent = frames(start, batch, [[0.25]] * len(batch))
    await unary(stub.ForwardBackward, sent, timeout_s=CALL_SECONDS)
    await unary(stub.OptimStep, step, timeout_s=CALL_SECONDS)
    return 1000 * (time.perf_counter() - began)


async def both_bare(stub: Any, prepared: list[pb.ForwardBackwardRequest]) -> float:
    """The same, of messages that were made before and are not looked at."""
    began = time.perf_counter()
    await stub.ForwardBackward(iter(prepared))
    await stub.OptimStep(pb.OptimStepRequest())
    return 1000 * (time.perf_counter() - began)


def rollouts(samples: int, tokens: int) -> list[rollout.Rollout]:
    """One sample each, a quarter of it prompt."""
    chance = random.Random(f"{samples}/{tokens}")
    prompt = tokens // 4
    made = []
    for member in range(samples):
        ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
        logprobs = [-chance.expovariate(1.0) for _ in range(tokens - prompt)]
        sample = rollout.Sample(token_ids=ids, logprobs=logprobs)
        sample.spans.add(start=prompt, length=tokens - prompt)
        made.append(rollout.Rollout(member=member, samples=[sample]))
    return made


def serve_nothing(folder: Path) -> None:
    """The trainer service with runs that answer at once, and a bare server beside it."""
    import transformers
    from quartet.kit import logs
    from quartet.kit.server import ServerConfig, serve
    from quartet_trainer.assembly import assemble
    from quartet_trainer.config import TrainerConfig
    from quartet_trainer.results import BatchResult, StepResult
    from quartet_trainer.run import Run

    class Idle(Run):
        def forward_backward(self, samples: Any, *settings: object) -> BatchResult:
            return BatchResult(0.0, 1, 1, {}, None)

        def optim_step(self, learning_rate: float | None) -> StepResult:
            return StepResult(0.0, 0.0, 1, False)

    class Bare(rpc.TrainerServiceServicer):
        async def ForwardBackward(self, request_iterator: Any, context: Any) -> pb.ForwardBackwardResponse:
            async for _ in request_iterator:
                pass
            return pb.ForwardBackwardResponse()

        async def OptimStep(self, request: Any, context: Any) -> pb.OptimStepResponse:
            return pb.OptimStepResponse()

    logs.configure("trainer")  # as the trainer does: unset, every call would render a line of debugging
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, intermediate_size=16,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")

    async def forever() -> None:
        bare = grpc.aio.server()
        rpc.add_TrainerServiceServicer_to_server(Bare(), bare)
        (folder / "bare").write_text(f"127.0.0.1:{bare.add_insecure_port('127.0.0.1:0')}")
        await bare.start()
        trainer = assemble(TrainerConfig(state_dir=folder / "states", device="cpu"), run_kind=Idle)
        server = ServerConfig(address="127.0.0.1:0", port_file=folder / "port")
        await serve(trainer.services, server, trainer.health)

    uvloop.run(forever())


if __name__ == "__main__":
    main()
