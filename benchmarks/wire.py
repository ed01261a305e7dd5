"""What a trained token costs on the wire, every byte counted.

1. The two hops of a trajectory (envhost -> orchestrator, orchestrator -> trainer) over real gRPC with the
   canonical channel, through a proxy that counts TCP bytes, for groups of 16 rollouts with 151,000-word
   vocabularies (three bytes per id, the worst usual case). Bar: at most 9 bytes per token of the trained
   sequences, counted over all tokens and over the sampled ones alone.
2. The main job itself (left out with `--no-job`), its four processes joined through such proxies: bytes of
   each hop per token of the trained sequences, with the same bar. Its sequences have about 29 tokens, so
   fixed costs (names, metrics, HTTP/2) weigh more than in any real job. The third hop, inference <->
   envhost, carries beside ids and log-probabilities the conversation as text, both ways (only inference has
   the tokenizer); what the members of a group have in common they send once.

    python benchmarks/wire.py [--no-job] [--model DIR] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
from counting_proxy import CountingProxy
from figures import Figure, arguments, report
from quartet.kit.channel import connect
from quartet.local.toml_text import dumps
from quartet.sampled_by import Heard, Told
from quartet.v1 import envhost_service_pb2 as envhost
from quartet.v1 import envhost_service_pb2_grpc as envhost_grpc
from quartet.v1 import orchestrator_service_pb2 as orchestration
from quartet.v1 import orchestrator_service_pb2_grpc as orchestrator_grpc
from quartet.v1 import rollout_pb2 as rollout
from quartet.v1 import trainer_service_pb2 as trainer
from quartet.v1 import trainer_service_pb2_grpc as trainer_grpc
from quartet_orchestrator.batches import frames

REPOSITORY = Path(__file__).resolve().parent.parent
VOCABULARY = 151_000
GROUP = 16
GROUPS = 8
SAMPLED_SHARE = 0.75
START_SECONDS = 120.0
JOB_STEPS = 10


def a_rollout(chance: random.Random, member: int, tokens: int) -> rollout.Rollout:
    """A rollout of so many tokens, a quarter of them prompt, the rest sampled by two versions."""
    sampled = int(tokens * SAMPLED_SHARE)
    prompt = tokens - sampled
    half = sampled // 2
    sample = rollout.Sample(
        token_ids=[chance.randrange(VOCABULARY) for _ in range(tokens)],
        spans=[
            rollout.PolicySpan(start=prompt, length=half, policy_version=41),
            rollout.PolicySpan(start=prompt + half, length=sampled - half, policy_version=42),
        ],
        logprobs=[-chance.expovariate(1.0) for _ in range(sampled)],
    )
    return rollout.Rollout(
        member=member,
        samples=[sample],
        reward=0.5,
        rewards={"lcs_reward": 0.5},
        metrics={"exact_match": 0.0},
        stop_condition="agent_completed",
        num_turns=1,
        timing=rollout.RolloutTiming(total_ms=1234, model_ms=1200, scoring_ms=3),
        replicas=["10.0.0.17:50053"],
        weights=[rollout.PolicyWeights(policy_version=one, weights_id=1 << 63 | one) for one in (41, 42)],
    )


class EnvHost(envhost_grpc.EnvHostServiceServicer):
    """Hands out prepared rollouts: only the wire is measured here."""

    def __init__(self, groups: Sequence[Sequence[rollout.Rollout]]) -> None:
        self.groups = groups

    async def RunRollouts(
        self, request: envhost.RunRolloutsRequest, context: object
    ) -> AsyncIterator[envhost.RunRolloutsResponse]:
        sampled_by = Told()
        for one in self.groups[request.task_index]:
            yield sampled_by.frame(one)


class Trainer(trainer_grpc.TrainerServiceServicer):
    """Takes batches and forgets them."""

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer.ForwardBackwardRequest], context: object
    ) -> trainer.ForwardBackwardResponse:
        async for _ in request_iterator:
            pass
        return trainer.ForwardBackwardResponse()


async def two_hops(tokens: int, seed: int) -> tuple[float, float]:
    """Bytes per token from envhost to orchestrator and from orchestrator to trainer."""
    chance = random.Random(seed)
    groups = [[a_rollout(chance, member, tokens) for member in range(GROUP)] for _ in range(GROUPS)]
    server = grpc.aio.server()
    envhost_grpc.add_EnvHostServiceServicer_to_server(EnvHost(groups), server)
    trainer_grpc.add_TrainerServiceServicer_to_server(Trainer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    total = GROUPS * GROUP * tokens
    first, second = [await CountingProxy(f"127.0.0.1:{port}").start() for _ in range(2)]
    async with connect(first.address) as channel:
        stub = envhost_grpc.EnvHostServiceStub(channel)
        for index in range(GROUPS):
            request = envhost.RunRolloutsRequest(run_id="r", task_index=index, members=range(GROUP))
            sampled_by = Heard()
            received = [sampled_by.rollout(frame) async for frame in stub.RunRollouts(request)]
            assert received == groups[index]
    async with connect(second.address) as channel:
        rollouts = [one for group in groups for one in group]
        batch_start = trainer.ForwardBackwardStart(run_id="r", seq_id=1)
        # The orchestrator's own frames.
        messages = frames(batch_start, rollouts, [[0.25]] * len(rollouts))
        await trainer_grpc.TrainerServiceStub(channel).ForwardBackward(messages, timeout=60)
    await server.stop(None)
    return first.total_bytes / total, second.total_bytes / total


async def start(name: str, folder: Path, *arguments: str) -> tuple[asyncio.subprocess.Process, str]:
    """One service as a process, and its address."""
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-m", f"quartet_{name}", "--server.port-file", str(port_file), *arguments]
    log = (folder / f"{name}.log").open("w")
    process = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=log, stderr=log)
    async with asyncio.timeout(START_SECONDS):
        while not port_file.exists():
            assert process.returncode is None, f"{name} ended: see {folder / name}.log"
            await asyncio.sleep(0.05)
    return process, port_file.read_text().strip()


async def trained_tokens(orchestrator: str, model: Path) -> tuple[int, int]:
    """Run the job; (tokens of all trained sequences, tokens sampled)."""
    config = tomllib.loads((REPOSITORY / "configs/reverse-text.toml").read_text())
    config |= {"model": str(model), "max_steps": JOB_STEPS, "eval": {"num_examples": 0}}
    text = dumps(config)
    totals = {"train/tokens": 0.0, "train/loss_tokens": 0.0}
    async with connect(orchestrator) as channel:
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        submit = orchestration.SubmitRunRequest(run_id="wire", config_toml=text)
        await stub.SubmitRun(submit, timeout=START_SECONDS)
        async for event in stub.WatchRun(orchestration.WatchRunRequest(run_id="wire"), timeout=600):
            for name in totals:
                totals[name] += event.step.metrics.get(name, 0.0)
            last = event.phase.run if event.HasField("phase") else None
    assert last is not None and last.phase == orchestration.RUN_PHASE_COMPLETED, last
    return int(totals["train/tokens"]), int(totals["train/loss_tokens"])


async def main_job(model: Path, folder: Path) -> list[Figure]:
    """The main job for a few steps, every hop through a counting proxy."""
    async with AsyncExitStack() as stack:

        async def up(name: str, *arguments: str) -> str:
            process, address = await start(name, folder, *arguments)
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
            return address

        async def proxy(address: str) -> CountingProxy:
            return await CountingProxy(address).start()

        trainer_address = await up("trainer", "--state-dir", str(folder / "states"))
        to_trainer, weights = await proxy(trainer_address), await proxy(trainer_address)
        arguments = ["--model", str(model), "--weights-address", weights.address]
        to_inference = await proxy(await up("inference", *arguments))
        arguments = ["--inference-addresses", json.dumps([to_inference.address])]
        arguments += ["--python", str(REPOSITORY / ".venv-envs/bin/python")]
        arguments += ["--environments.reverse-text.workers", "1"]
        to_envhost = await proxy(await up("envhost", *arguments))
        arguments = ["--trainer-address", to_trainer.address, "--data-dir", str(folder / "journal")]
        arguments += ["--envhost-addresses", json.dumps([to_envhost.address])]
        tokens, sampled = await trained_tokens(await up("orchestrator", *arguments), model)
        hops = {
            "inference <-> envhost": to_inference,
            "envhost <-> orchestrator": to_envhost,
            "orchestrator <-> trainer": to_trainer,
        }
        figures = [Figure("main job: tokens of a trained sequence", tokens / (JOB_STEPS * 128), "tokens")]
        for name, hop in hops.items():
            figures.append(Figure(f"main job: {name}", hop.total_bytes / tokens, "bytes/token", "<= 9"))
            figures.append(Figure(f"main job: {name}", hop.total_bytes / sampled, "bytes/sampled"))
        return [*figures, Figure("main job: weights", weights.total_bytes / JOB_STEPS, "bytes/step")]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-job", action="store_true", help="leave the main job out")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    figures = []
    for tokens in (32, 128, 512, 4096):
        first, second = asyncio.run(two_hops(tokens, seed=tokens))
        bar = "<= 9"
        figures.append(Figure(f"{tokens} tokens: envhost -> orchestrator", first, "bytes/token", bar))
        figures.append(Figure(f"{tokens} tokens: orchestrator -> trainer", second, "bytes/token", bar))
        dearest = max(first, second) / SAMPLED_SHARE
        figures.append(Figure(f"{tokens} tokens: the dearer of the two", dearest, "bytes/sampled", bar))
    if not options.no_job:
        model = options.model or REPOSITORY / "models/tiny"
        with tempfile.TemporaryDirectory(prefix="quartet-wire-") as folder:
            figures += asyncio.run(main_job(model.resolve(), Path(folder)))
    report(figures, options.json)


if __name__ == "__main__":
    main()
