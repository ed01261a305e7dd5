"""FetchRunModel: what the trainer sends of a run's model, handed on piece by piece."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from orch_world import RUN, serving
from quartet.errors import QuartetError
from quartet.kit.call import stream, unary
from quartet.v1 import model_pb2 as mpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.common_pb2 import Heartbeat
from quartet_orchestrator import trainer_client
from quartet_orchestrator.exported import Keeper, handed_on

MANIFEST = mpb.ModelManifest(run_id=RUN, state="final", digest=b"d" * 16)
CHUNKS = [mpb.ModelChunk(path="config.json", offset=at, data=b"x", checksum=at) for at in range(3)]


def sent():
    beat = tpb.FetchModelResponse(heartbeat=Heartbeat())
    chunks = [tpb.FetchModelResponse(chunk=chunk) for chunk in CHUNKS]
    return [beat, tpb.FetchModelResponse(manifest=MANIFEST), chunks[0], beat, *chunks[1:]]


HANDED_ON = [
    pb.FetchRunModelResponse(manifest=MANIFEST),
    *(pb.FetchRunModelResponse(chunk=chunk) for chunk in CHUNKS),
]


async def fetched(stub, **request):
    call = stub.FetchRunModel(pb.FetchRunModelRequest(**{"run_id": RUN, **request}))
    return [frame async for frame in stream(call, idle_timeout_s=20)]


async def refused(stub, reason, **request):
    with pytest.raises(QuartetError) as raised:
        await fetched(stub, **request)
    assert raised.value.reason == reason, raised.value
    return raised.value


async def completed(stub, toml):
    await unary(stub.SubmitRun, pb.SubmitRunRequest(run_id=RUN, config_toml=toml), timeout_s=20)
    async for _ in stream(stub.WatchRun(pb.WatchRunRequest(run_id=RUN)), idle_timeout_s=20):
        pass


async def test_a_model_is_handed_on_and_so_is_what_is_refused(world):
    """exported.py 2 and 3: of that run and no other, in the trainer's words, but for a refusal of the
    orchestrator itself."""
    world.trainer.frames = sent()
    async with serving(world) as stub:
        await refused(stub, "RUN_UNKNOWN")
        await completed(stub, world.toml(steps=1, evals=0))
        assert world.trainer.closed == [RUN] and not world.trainer.fetched
        assert await fetched(stub) == HANDED_ON
        place = mpb.ModelPlace(digest=b"d" * 16, path="config.json", offset=1)
        spec = world.trainer.checked[0].spec
        assert spec.optimizer.total_steps == 1
        asked = {"state": "final", "adapter": True, "resume": place}
        assert await fetched(stub, **asked) == HANDED_ON
        assert world.trainer.fetched == [
            tpb.FetchModelRequest(run_id=RUN, spec=spec),
            tpb.FetchModelRequest(run_id=RUN, spec=spec, **asked),
        ]
        told = QuartetError("RESOURCE_UNKNOWN", "state closed has no model; let it end", name="closed")
        world.trainer.frames = [told]
        error = await refused(stub, "RESOURCE_UNKNOWN")
        assert (error.message, error.metadata) == (told.message, told.metadata)
        world.trainer.frames = [*sent()[:3], QuartetError("UNAUTHENTICATED", "the token is wrong")]
        error = await refused(stub, "NOT_READY")
        assert f"the trainer at {world.addresses['trainer']} does not answer: the token" in error.message
        await world.kill("trainer")
        error = await refused(stub, "NOT_READY")
        assert "the trainer at" in error.message and "grpc_code" not in error.metadata
        await world.serve("trainer")
    world.trainer.frames = sent()
    (journal,) = (world.folder / "runs" / RUN).glob("*.seg")
    async with serving(world) as stub:
        assert await fetched(stub) == HANDED_ON, "also after a restart"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    async with serving(world) as stub:
        status = await unary(stub.GetRunStatus, pb.GetRunStatusRequest(run_id=RUN), timeout_s=20)
        assert status.run.phase == pb.RUN_PHASE_FAILED, "its journal is damaged"
        assert await fetched(stub) == HANDED_ON, "and its model is not"
        assert not world.trainer.fetched[-1].HasField("spec"), "which run it was nobody can read"


async def test_a_trainer_that_falls_silent_ends_the_stream(world, monkeypatch: pytest.MonkeyPatch):
    """exported.py 4: the caller has what came until then, and asks again from there."""
    monkeypatch.setattr(trainer_client, "IDLE_TIMEOUT_SECONDS", 0.3)
    world.trainer.frames = [*sent()[:3], asyncio.Event()]
    async with serving(world) as stub:
        await completed(stub, world.toml(steps=1, evals=0))
        came = []
        with pytest.raises(QuartetError) as raised:
            call = stub.FetchRunModel(pb.FetchRunModelRequest(run_id=RUN))
            async for frame in stream(call, idle_timeout_s=20):
                came.append(frame)
    assert raised.value.reason == "DEADLINE" and came == HANDED_ON[:2]


async def test_a_run_of_somebody_elses_trainer_has_its_model_there(world):
    await world.serve("policy")
    async with serving(world) as stub:
        lines = world.toml(external_trainer="true").replace("[checks]\nverify_logprobs = true", "")
        toml = lines.replace("[ckpt]\ninterval = 2", "")
        await unary(stub.SubmitRun, pb.SubmitRunRequest(run_id=RUN, config_toml=toml), timeout_s=20)
        error = await refused(stub, "INVALID_REQUEST")
        assert "is trained by somebody else's program, which has its weights; ask there" in error.message
        assert not world.trainer.fetched


async def test_the_trainer_is_not_run_ahead_of_and_left_with_the_caller():
    """exported.py 1."""
    taken, left = [], asyncio.Event()

    class Client:
        address = "h:1"

        async def fetch_model(self, request):
            try:
                for frame in sent():
                    taken.append(frame)
                    yield frame
            finally:
                left.set()

    async with aclosing(handed_on(Keeper(Client(), None), pb.FetchRunModelRequest(run_id=RUN))) as frames:
        assert await anext(frames) == HANDED_ON[0] and len(taken) == 2
        assert await anext(frames) == HANDED_ON[1] and len(taken) == 3
    assert left.is_set()
