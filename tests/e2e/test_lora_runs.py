"""Two runs train adapters at once: one base in the trainer, one in the replica. Both runs are sampled in the
same batches of the engine, each from its own adapter; and they do so where a whole model was trained before.
Real trainer, real replica, real gRPC.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, start
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet_orchestrator.outage import Outage
from quartet_orchestrator.policies import Policies

STEPS, ROLLOUTS = 3, 6
RUNS = {"a": tpb.LoraSpec(rank=4, alpha=8.0), "b": tpb.LoraSpec(rank=7, alpha=7.0, rslora=True)}


@asynccontextmanager
async def world(folder: Path, states: Path) -> AsyncIterator[tuple[Any, Any, str]]:
    """(trainer, inference, the address of inference)."""
    from quartet_inference import app
    from quartet_inference.config import InferenceConfig
    from quartet_trainer.assembly import assemble
    from quartet_trainer.config import TrainerConfig

    trainer, health = assemble(TrainerConfig(state_dir=states, device="cpu")), Health()
    server = await start(trainer.services, ServerConfig(address="127.0.0.1:0"), trainer.health)
    embedded = {"kv_cache_bytes": 1 << 26, "kv_on_update": "recompute"}
    config = InferenceConfig(model=folder, weights_address=server.address, embedded=embedded)
    async with app.services(config, health) as services:
        replica = await start(services, config.server, health)
        async with connect(server.address) as one, connect(replica.address) as two:
            yield TrainerServiceStub(one), InferenceServiceStub(two), replica.address
        await replica.stop(0)
    await server.stop(0)
    await trainer.worker.close()


async def sampled(inference: Any, run_id: str, version: int, number: int) -> tpb.TrainingSample:
    """One completion of a run, at least at a version."""
    sampling = common_pb2.SamplingParams(max_tokens=12, temperature=1.0)
    prompt = [3 + number, 5, 9, 40]
    request = ipb.GenerateRequest(run_id=run_id, sampling=sampling, min_policy_version=version)
    request.tokens.token_ids.extend(prompt)
    sample = rollout_pb2.Sample(token_ids=prompt)
    async for answer in inference.Generate(request, timeout=30):
        if answer.HasField("delta"):
            for span in answer.delta.spans:
                start = len(prompt) + span.start
                version = span.policy_version
                sample.spans.add(start=start, length=span.length, policy_version=version)
            sample.token_ids.extend(answer.delta.token_ids)
            sample.logprobs.extend(answer.delta.logprobs)
    covered = len(sample.logprobs)
    sign = 1.0 if sample.token_ids[-1] % 2 else -1.0
    return tpb.TrainingSample(sample=sample, advantages=[sign] * covered)


async def frames(start: tpb.ForwardBackwardStart, samples: Any) -> AsyncIterator[tpb.ForwardBackwardRequest]:
    yield tpb.ForwardBackwardRequest(start=start)
    yield tpb.ForwardBackwardRequest(batch=tpb.SampleBatch(samples=samples))
    tokens = sum(len(one.sample.token_ids) for one in samples)
    commit = tpb.StreamCommit(sample_count=len(samples), token_count=tokens)
    yield tpb.ForwardBackwardRequest(commit=commit)


async def run(trainer: Any, inference: Any, run_id: str, ready: Any) -> list[float]:
    """Sample, train and publish; how far sampler and trainer were apart."""
    await trainer.PublishWeights(tpb.PublishWeightsRequest(run_id=run_id, seq_id=1))
    await ready(run_id)
    seq, apart = 2, []
    for step in range(STEPS):
        batch = await asyncio.gather(*(sampled(inference, run_id, step, n) for n in range(ROLLOUTS)))
        assert {span.policy_version for one in batch for span in one.sample.spans} == {step}
        start = tpb.ForwardBackwardStart(
            run_id=run_id,
            seq_id=seq,
            loss=tpb.LossSpec(kind=tpb.LOSS_KIND_POLICY_GRADIENT),
            normalizer=sum(len(one.sample.logprobs) for one in batch),
            verify_logprobs=True,
        )
        done = await trainer.ForwardBackward(frames(start, batch))
        assert done.verification.tokens_skipped == 0
        apart.append(done.verification.max_difference)
        await trainer.OptimStep(tpb.OptimStepRequest(run_id=run_id, seq_id=seq + 1))
        await trainer.PublishWeights(tpb.PublishWeightsRequest(run_id=run_id, seq_id=seq + 2))
        seq += 3
    return apart


async def test_two_runs_share_a_base_in_trainer_and_engine(tiny_model: Path, tmp_path: Path) -> None:
    async with world(tiny_model, tmp_path) as (trainer, inference, address):
        optimizer = tpb.OptimizerSpec(learning_rate=3e-3)
        for run_id, lora in RUNS.items():
            spec = tpb.RunSpec(base_model=str(tiny_model), lora=lora, optimizer=optimizer, retain_versions=2)
            await trainer.CreateRun(tpb.CreateRunRequest(run_id=run_id, spec=spec))
        policies = Policies([address], ClientSecurity())

        async def ready(run_id: str) -> None:
            """As an orchestrator waits: the replica follows the run opened last, the other one is loaded."""
            await policies.serving(run_id, 0, adapter=True)

        apart = await asyncio.gather(*(run(trainer, inference, run_id, ready) for run_id in RUNS))
        assert max(max(one) for one in apart) <= 2e-5
        async with asyncio.timeout(10):
            while True:
                model = await inference.GetModel(ipb.GetModelRequest())
                if {one.run_id: one.policy_version for one in model.adapters} == dict.fromkeys(RUNS, STEPS):
                    break
                await asyncio.sleep(0.05)
        assert (model.run_id, model.policy_version) == ("", 0)
        await policies.close()


async def test_adapters_are_trained_where_a_whole_model_was_trained_before(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with world(tiny_model, tmp_path) as (trainer, inference, address):
        policies = Policies([address], ClientSecurity())
        for run_id, lora in (("whole", None), ("a", RUNS["a"]), ("again", None)):
            optimizer = tpb.OptimizerSpec(learning_rate=3e-3)
            spec = tpb.RunSpec(base_model=str(tiny_model), lora=lora, optimizer=optimizer, retain_versions=2)
            await trainer.CreateRun(tpb.CreateRunRequest(run_id=run_id, spec=spec))

            async def ready(run_id: str, adapter: bool = lora is not None) -> None:
                await Outage("inference", 30.0, lambda message, *, warning=False: None).through(
                    lambda: policies.serving(run_id, 0, adapter=adapter)
                )

            assert max(await run(trainer, inference, run_id, ready)) <= 2e-5
            await trainer.CloseRun(tpb.CloseRunRequest(run_id=run_id))
        await policies.close()


async def test_a_run_begins_with_the_adapter_of_a_deleted_one_of_its_name(
    random_model: Path, tmp_path: Path
) -> None:
    """The replica serves the old one's last version until the new one's version 0 is there."""
    async with world(random_model, tmp_path / "states") as (trainer, inference, address):
        policies = Policies([address], ClientSecurity())

        async def ready(run_id: str) -> None:
            """As an orchestrator waits for the first version of a run."""
            first = await trainer.PublishWeights(tpb.PublishWeightsRequest(run_id=run_id, seq_id=1))
            await Outage("inference", 30.0, lambda message, *, warning=False: None).through(
                lambda: policies.serving(run_id, 0, adapter=True, digest=first.digest)
            )

        lora = tpb.LoraSpec(rank=4, alpha=8.0)
        for begins in ("", str(tmp_path / "adapter")):
            lora.initial_adapter = begins
            optimizer = tpb.OptimizerSpec(learning_rate=3e-3)
            spec = tpb.RunSpec(
                base_model=str(random_model), lora=lora, optimizer=optimizer, retain_versions=2
            )
            created = await trainer.CreateRun(tpb.CreateRunRequest(run_id="a", spec=spec))
            assert (created.run.applied_seq_id, created.run.policy_version) == (0, 0)
            assert max(await run(trainer, inference, "a", ready)) <= 2e-5
            last = 2 + 3 * STEPS
            request = tpb.SaveStateRequest(run_id="a", seq_id=last, name="end", export_model=True)
            saved = (await trainer.SaveState(request)).state
            if not begins:
                shutil.copytree(Path(saved.model_path) / "adapter", tmp_path / "adapter")
            await trainer.CloseRun(tpb.CloseRunRequest(run_id="a"))
            assert (await trainer.DeleteStates(tpb.DeleteStatesRequest(run_id="a"))).states == 1
        await policies.close()
